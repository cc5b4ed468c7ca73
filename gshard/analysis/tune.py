"""`gshard advise`: which level, mesh and micro-batches fit a machine, fastest first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AbstractMesh

from gshard._util.errors import GShardError, warn
from gshard.analysis.aot.target import Target
from gshard.analysis.calibration import Calibration
from gshard.analysis.config import Config
from gshard.analysis.cost_model import Cost, cost, seconds_to_send
from gshard.analysis.fewer_bits import FewerBits, fewer_bits
from gshard.analysis.forecast import abstract_mesh, footprint_of, level_forecast
from gshard.analysis.forecast_report import LevelForecast
from gshard.analysis.memory.footprint import MARGIN, Footprint
from gshard.analysis.setup import (
    Choices,
    TrainSetup,
    batch_bytes,
    load_setup,
    sharded_setup,
    without_arrays,
)
from gshard.sharding.level import LEVELS
from gshard.sharding.plan import Plan

_MOST_EXAMPLES = 10**9  # of a device in a step


@dataclass(frozen=True)
class Verdict:
    """Whether an option fits a machine, and how long a step takes.

    All bytes are those of one device. `needs` is the peak, without activations if the option does
    not fit even without these; `has` is what programs can use, and `host` is stored on the host.
    `cost` is None if the option does not fit.
    """

    option: Option
    devices: int
    needs: int
    has: int
    host: int
    cost: Cost | None

    @property
    def fits(self) -> bool:
        """Whether the memory of the device and of the host is large enough."""
        return self.cost is not None

    @property
    def names(self) -> dict[str, str]:
        """What identifies the option, by the heading of its column."""
        option = self.option
        return {
            "level": option.level,
            "replica x shard": f"{option.replica} x {self.devices // option.replica}",
            "micro-batches": f"{option.choices.micro_batches} x {option.choices.micro_batch_size}",
            "with": option.extras_text,
        }

    @property
    def balance(self) -> float | None:
        """Examples of a micro-batch for which the other work takes as long as communication."""
        if self.cost is None or not self.cost.wire:
            return None
        busy = self.cost.compute + self.cost.memory
        return self.option.choices.micro_batch_size * self.cost.wire / busy if busy else None

    def as_dict(self, base: float = 1.0) -> dict[str, Any]:
        """Everything as dicts, strings and numbers, ready for JSON; times in units of `base`."""
        return {
            **dataclasses.asdict(self.option),
            "shard": self.devices // self.option.replica,
            **{name: getattr(self, name) for name in ("needs", "has", "host")},
            "fits": self.fits,
            "cost": None if self.cost is None else self.cost.as_dict(base),
            "balance_examples": self.balance,
        }


def advise(
    config: Config,
    report: Callable[[int, int, str], None] | None = None,
    measured: Calibration | None = None,
) -> list[Verdict]:
    """Compares the options for a config on its target: those that fit come first, fastest first.

    All options take the config's number of examples in a step. `cost_model` estimates the time,
    with `measured` rates if they are given. `report` is called with the number of options that are
    done, that of all, and the best so far. A warning counts the options that raise an error: they
    are left out.

    Raises:
      GShardError: there is no target, or every option raises an error.
    """
    target = config.target
    if target is None:
        raise GShardError("for which machine? Give --target, such as h100:1x8.")
    found: list[Verdict] = []

    def say(done: int, of: int) -> None:
        if report is not None:
            best = ranked(found)[0] if found else None
            words = ", ".join(filter(None, best.names.values())) if best and best.fits else ""
            report(done, of, f"best so far: {words}" if words else "")

    options = list(options_to_try(config))
    setups: dict[str, TrainSetup] = {}

    def setup_of(option: Option) -> TrainSetup:
        key = repr(sorted(option.arguments.items()))
        if key not in setups:
            made = load_setup(config.model, {**config.arguments, **option.arguments})
            setups[key] = without_arrays(made)
        return setups[key]

    refused: list[GShardError] = []
    without: dict[Any, Option] = {}  # one of each kind that is refused without replicas
    may_offload = target.platform != "cpu" and "offload" not in config.given

    def judge(option: Option) -> None:
        asked, setup = config.choices.reshard_after_forward is not True, None
        try:
            setup = setup_of(option)
            if asked or not _repeats(setup, target, option):
                for verdict in _judged(setup, target, option, measured, may_offload):
                    found.append(verdict)  # one by one: the second may be refused
        except GShardError as error:  # such as a value of `vary` that the model does not take
            refused.append(error)
            if setup is not None:
                without.setdefault(option.kind, option)

    for done, option in enumerate(options):
        say(done, len(options))
        judge(option)
    # Replicas change neither activations nor arithmetic: only the best options are tried with them.
    best = {x.option.kind: x.option for x in best_of_each([x for x in ranked(found) if x.fits])}
    tried = {} if "replica" in config.given else without | best
    replicated = [more for x in tried.values() for more in with_replicas(x, target)]
    total = len(options) + len(replicated)
    for done, option in enumerate(replicated, len(options)):
        say(done, total)
        judge(option)
    say(total, total)
    if refused and not found:
        raise refused[0]
    if refused:
        what = "options raise an error and are" if refused[1:] else "option raises an error and is"
        warn(f"{len(refused)} {what} left out. The first error: {refused[0]}")
    return ranked(found)


def bits_to_save(config: Config, found: Sequence[Verdict]) -> list[FewerBits]:
    """Says what sending and storing in fewer bits would give the first option."""
    target, first = config.target, found[0].option
    if target is None:
        return []
    made = load_setup(config.model, {**config.arguments, **first.arguments})
    mesh = first.mesh(target.devices)
    near = target.devices_per_node
    return fewer_bits(without_arrays(made), mesh, first.level, first.choices, near)


def _repeats(setup: TrainSetup, target: Target, option: Option) -> bool:
    """Whether an option keeps gathered parameters although its plan gathers none."""
    if option.choices.reshard_after_forward is not False:
        return False
    mesh = option.mesh(target.devices)
    return not sharded_setup(setup, mesh, option.level, option.choices)[1].gathers


def best_of_each(found: Sequence[Verdict]) -> list[Verdict]:
    """The first of each group of options that differ only in replicas and micro-batches."""
    first = {x.option.kind: x for x in reversed(found)}
    return [x for x in found if x is first[x.option.kind]]


TIE = 1.05  # the cost model cannot tell options apart that are closer than this


def ranked(found: Sequence[Verdict]) -> list[Verdict]:
    """Options that fit by time, then the others by memory.

    The fastest option and those within 5 % of it are ties, and so on for the rest. Of ties the
    simplest comes first: without offload, then by the level (`dp` to `p_g_os`), then with less
    rematerialization (fewer FLOPs), fewer micro-batches, fewer replicas, and less memory.
    """

    def simplest(x: Verdict) -> tuple[Any, ...]:
        option = x.option
        flops = 0.0 if x.cost is None else x.cost.compute
        return (
            option.choices.offload,
            list(LEVELS).index(option.level),
            float(f"{flops:.2g}"),
            option.choices.micro_batches,
            option.replica,
            x.needs,
        )

    left = sorted((x for x in found if x.cost), key=lambda x: x.cost.step if x.cost else 0.0)
    made: list[Verdict] = []
    while left:
        most = TIE * (left[0].cost.step if left[0].cost else 0.0)
        ties = [x for x in left if x.cost and x.cost.step <= most]
        made += sorted(ties, key=simplest)
        left = left[len(ties) :]
    return made + sorted((x for x in found if not x.cost), key=lambda x: x.needs)


def _judged(
    setup: TrainSetup,
    target: Target,
    option: Option,
    measured: Calibration | None,
    may_offload: bool,
) -> Iterator[Verdict]:
    """The verdict on an option; if it does not fit, also with the optimizer state on the host."""
    first = _verdict(setup, target, option, measured)
    yield first
    if first.fits or option.choices.offload or not may_offload:
        return
    offloaded = dataclasses.replace(option.choices, offload=True)
    second = _verdict(setup, target, dataclasses.replace(option, choices=offloaded), measured)
    if second.host:
        yield second


def _verdict(
    setup: TrainSetup, target: Target, option: Option, measured: Calibration | None
) -> Verdict:
    choices, has = option.choices, target.memory
    mesh = option.mesh(target.devices)
    state, plan = sharded_setup(setup, mesh, option.level, choices)
    near = target.devices_per_node
    level = level_forecast(plan, choices, batch_bytes(setup, plan, choices), near)
    # The least that it can need: the trace says how much of a layer is gathered.
    needs, seconds = level.needs - level.gathered, None
    if needs <= has and level.host <= target.chip.host_memory:
        seen = footprint_of(setup, state, plan, choices, target.platform, near)
        needs = seen.peak
        if MARGIN * seen.peak <= has:
            seconds = step_cost(target, plan, level, seen, measured)
    return Verdict(option, target.devices, needs, has, level.host, seconds)


def step_cost(
    target: Target,
    plan: Plan,
    level: LevelForecast,
    seen: Footprint,
    measured: Calibration | None = None,
) -> Cost:
    """The cost of a traced step: its collectives, its memory traffic and FLOPs."""
    overlapped = all_gather_params = 0.0
    for row in seen.collectives:
        seconds = seconds_to_send(target, row.wire_bytes, row.network_bytes, measured)
        if row.of_update:
            all_gather_params += seconds
        else:
            overlapped += seconds
    starts = sum(row.count for row in seen.collectives)
    starts_of_nodes = sum(row.count for row in seen.collectives if row.network_bytes)
    # The update reads and writes moments and master copies, writes parameters and reads gradients:
    # a part of the traffic of the step that no computation overlaps with.
    update = 2 * level.optimizer + level.params + level.gradients
    rest = max(0, seen.traffic - update)
    return cost(
        target, seen.flops, rest, overlapped, all_gather_params, update, level.host, starts,
        starts_of_nodes, measured,
    )  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One way to train a model: level, replicas of the sharded state, and options of the step.

    `sequence` devices share the sequences of an example. `arguments` of the model's function are
    those that `vary` lists, with their values.
    """

    level: str
    replica: int
    choices: Choices
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 1
    expert: int = 1

    def mesh(self, devices: int) -> AbstractMesh:
        """The mesh of this option."""
        return abstract_mesh(devices, self.replica, self.sequence, self.expert)

    @property
    def extras_text(self) -> str:
        """Readable options other than level, replicas and micro-batches."""
        more = [f"{name} {value}" for name, value in self.arguments.items()]
        if self.choices.offload:
            more.append("offload")
        if self.choices.reshard_after_forward is False:
            more.append("kept for backward")
        return ", ".join(more)

    @property
    def kind(self) -> tuple[str, str]:
        """What options have in common that differ only in replicas and micro-batches."""
        return self.level, self.extras_text


def options_to_try(config: Config) -> Iterator[Option]:
    """The options to compare, without offload (tried for what does not fit) and replicas.

    These are the levels of the config with all equal micro-batches of a device's examples, with and
    without keeping gathered parameters unless that is given, and with all values in `vary`.
    """
    chosen = config.choices
    examples = chosen.micro_batch_size * chosen.micro_batches
    tried = [[(name, value) for value in values] for name, values in config.vary.items()]
    if examples > _MOST_EXAMPLES:
        raise GShardError(
            f"{examples:,} examples of a device in a step are more than gshard advise divides into "
            "micro-batches. Give a smaller micro_batch_size= or micro_batches=."
        )
    small = [k for k in range(1, math.isqrt(examples) + 1) if examples % k == 0]
    splits = sorted({*small, *(examples // k for k in small)})
    for arguments, name in itertools.product(itertools.product(*tried), config.levels):
        level, reshards = LEVELS[name], (chosen.reshard_after_forward,)
        if not level.shards_params:
            reshards = (True,)
        elif reshards == (True,) and "reshard_after_forward" not in config.given:
            reshards = (True, False)
        for k, reshard in itertools.product(splits, reshards):
            choices = dataclasses.replace(
                chosen,
                micro_batches=k,
                micro_batch_size=examples // k,
                reshard_after_forward=reshard,
            )
            replica = config.replica if level.shards_opt_state else 1
            axes = config.sequence, config.expert
            yield Option(name, replica, choices, dict(arguments), *axes)


def with_replicas(option: Option, target: Target) -> Iterator[Option]:
    """The same option with replicas of the sharded state, unless it has some already."""
    if LEVELS[option.level].shards_opt_state and option.replica == 1:
        for replica in replicas_of(target)[1:]:
            if target.devices % (replica * option.sequence * option.expert) == 0:
                yield dataclasses.replace(option, replica=replica)


def replicas_of(target: Target) -> tuple[int, ...]:
    """Numbers of replicas of the sharded state that suit a machine: each has some of the hosts.

    A TPU slice is one shard group, sharded over the axes of its torus.
    """
    if target.platform != "gpu":
        return (1,)
    return tuple(n for n in range(1, target.hosts + 1) if target.hosts % n == 0)
