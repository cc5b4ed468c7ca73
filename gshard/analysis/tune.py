"""`advise`: which level, mesh, micro-batches, offload and remat fit a machine, fastest first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard._util.errors import GShardError
from gshard.analysis.aot.target import Target
from gshard.analysis.config import Config
from gshard.analysis.cost_model import Cost, cost
from gshard.analysis.forecast import abstract_mesh, footprint_of, of_level
from gshard.analysis.forecast_report import LevelForecast
from gshard.analysis.memory.footprint import Footprint
from gshard.analysis.setup import (
    Choices,
    TrainSetup,
    batch_bytes,
    load_setup,
    sharded_setup,
    without_arrays,
)
from gshard.sharding.level import LEVELS, Level
from gshard.sharding.plan import Plan


@dataclass(frozen=True)
class Verdict:
    """What an option takes, and how long.

    Attributes:
      option: what was asked.
      devices: in all.
      needs: bytes of a device's memory at the peak; where what is known without activations is too
        much already, that alone.
      has: bytes that programs of a device can use.
      host: bytes in the host's memory for one device.
      cost: seconds by resource; None where it does not fit.
    """

    option: Option
    devices: int
    needs: int
    has: int
    host: int
    cost: Cost | None

    @property
    def fits(self) -> bool:
        """Whether the memory of the device and of the host are enough."""
        return self.cost is not None

    @property
    def balance(self) -> float | None:
        """Rows of one micro-batch of a device with which computing takes as long as sending.

        With fewer the wire binds. What is sent does not depend on them.
        """
        if self.cost is None or not self.cost.wire:
            return None
        busy = max(self.cost.compute, self.cost.memory)
        return self.option.choices.micro_batch_size * self.cost.wire / busy if busy else None

    def as_dict(self) -> dict[str, Any]:
        """Everything in dicts, lists, strings and numbers, ready for JSON."""
        return {
            **dataclasses.asdict(self.option),
            "shard": self.devices // self.option.replica,
            "needs": self.needs,
            "has": self.has,
            "host": self.host,
            "fits": self.fits,
            "cost": None if self.cost is None else self.cost.as_dict(),
            "balance_rows": self.balance,
        }


def advise(config: Config, report: Callable[[int, int], None] | None = None) -> list[Verdict]:
    """Every way to train a config that is worth a look: those that fit first, by time.

    All take the same rows in a step: those of the config. The model of time is that of `cost`.

    Args:
      config: with a target.
      report: called with how many options are done, of how many.

    Raises:
      GShardError: there is no target, or the model is wrong.
    """
    target = config.target
    if target is None:
        raise GShardError("for which machine? Give --target, such as h100:1x8.")
    if target.chip.usable is None:
        raise GShardError(
            f"{target.text} shares this computer's memory. Name an accelerator, such as h100:1x8."
        )
    options = list(options_of(config))
    setups: dict[str, TrainSetup] = {}

    def setup_of(option: Option) -> TrainSetup:
        key = repr(sorted(option.arguments.items()))
        if key not in setups:
            made = load_setup(config.model, {**config.arguments, **option.arguments})
            setups[key] = without_arrays(made)
        return setups[key]

    found: list[Verdict] = []
    for done, option in enumerate(options):
        if report is not None:
            report(done, len(options))
        setup = setup_of(option)
        if config.choices.reshard_after_forward is not True or not _repeats(setup, target, option):
            found += _judged(setup, target, option)
    # Copies change neither activations nor arithmetic: they are tried with what is best without.
    best = best_of_each([x for x in ranked(found) if x.fits])
    copies = [more for x in best for more in copies_of(x.option, target)]
    for done, option in enumerate(copies, len(options)):
        if report is not None:
            report(done, len(options) + len(copies))
        found += _judged(setup_of(option), target, option)
    if report is not None:
        report(len(options) + len(copies), len(options) + len(copies))
    return ranked(found)


def _repeats(setup: TrainSetup, target: Target, option: Option) -> bool:
    """Whether an option keeps what was gathered and gathers nothing, as the one that does not."""
    if option.choices.reshard_after_forward is not False:
        return False
    mesh = abstract_mesh(target.devices, option.replica)
    return not sharded_setup(setup, mesh, option.level, option.choices)[1].gathers


def best_of_each(found: Sequence[Verdict]) -> list[Verdict]:
    """The first of those that differ in copies and micro-batches alone."""
    first = {x.option.kind: x for x in reversed(found)}
    return [x for x in found if x is first[x.option.kind]]


def ranked(found: Sequence[Verdict]) -> list[Verdict]:
    """Those that fit by time, the others by what they need; of equal ones what needs less first."""

    def order(x: Verdict) -> tuple[bool, float, int]:
        return x.cost is None, 0.0 if x.cost is None else float(f"{x.cost.step:.3g}"), x.needs

    return sorted(found, key=order)


def _judged(setup: TrainSetup, target: Target, option: Option) -> list[Verdict]:
    """The verdict on an option; where it does not fit, with the state on the host beside it."""
    first = _verdict(setup, target, option)
    if first.fits or option.choices.offload:
        return [first]
    away = dataclasses.replace(option.choices, offload=True)
    second = _verdict(setup, target, dataclasses.replace(option, choices=away))
    return [first, second] if second.host else [first]


def _verdict(setup: TrainSetup, target: Target, option: Option) -> Verdict:
    choices, has = option.choices, target.chip.usable or 0
    mesh = abstract_mesh(target.devices, option.replica)
    state, plan = sharded_setup(setup, mesh, option.level, choices)
    level = of_level(plan, choices, batch_bytes(setup, plan, choices))

    def verdict(needs: int, seconds: Cost | None = None) -> Verdict:
        return Verdict(option, target.devices, needs, has, level.host, seconds)

    at_least = level.needs - level.gathered  # how much of a layer is whole the trace says
    if at_least > has or level.host > target.chip.host_memory:
        return verdict(at_least)
    seen = footprint_of(setup, state, plan, choices, target.platform)
    if seen.peak > has:
        return verdict(seen.peak)
    return verdict(seen.peak, _cost(target, plan, level, seen))


def _cost(target: Target, plan: Plan, level: LevelForecast, seen: Footprint) -> Cost:
    """What the trace moves, by where it goes: gathers of what rests whole publish an update."""
    at_rest = plan.gathers
    wire: dict[str, int] = dict.fromkeys(("shard", "copies", "update"), 0)
    for row in seen.collectives:
        if row.kind == "all-gather" and not at_rest:
            wire["update"] += row.wire_bytes
        elif row.kind == "all-reduce" and plan.group.replicas > 1:
            wire["copies"] += row.wire_bytes
        else:
            wire["shard"] += row.wire_bytes
    # Moments and master copies are read and written, parameters written, gradients read: a part of
    # the traffic of the whole step, for which nothing is computed beside.
    update = 2 * level.optimizer + level.params + level.gradients
    rest = max(0, seen.traffic - update)
    return cost(target, plan.group, seen.flops, rest, wire, update, level.host)


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
      level: its name.
      replica: copies of the divided state.
      choices: of the step.
      arguments: of the model's function, those that were varied.
    """

    level: str
    replica: int
    choices: Choices
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beside(self) -> str:
        """What was chosen beside level, copies and micro-batches, in words."""
        more = [f"{name} {value}" for name, value in self.arguments.items()]
        if self.choices.offload:
            more.append("offload")
        if self.choices.reshard_after_forward is False:
            more.append("kept for backward")
        return ", ".join(more)

    @property
    def kind(self) -> tuple[str, str]:
        """What options that differ in copies and micro-batches alone have in common."""
        return self.level, self.beside


def options_of(config: Config) -> Iterator[Option]:
    """Every way that is worth a look.

    Copies as the config says. Micro-batches: all ways to take the rows of a device in equal parts.
    Whether what was gathered is kept, where parameters rest divided. What `vary` lists. Offloading
    and copies come later, for what does not fit and what does.
    """
    chosen = config.choices
    rows = chosen.micro_batch_size * chosen.micro_batches
    tried = [[(name, value) for value in values] for name, values in config.vary.items()]
    for arguments, name in itertools.product(itertools.product(*tried), config.levels):
        for k in (k for k in range(1, rows + 1) if rows % k == 0):
            for reshard in _reshards(chosen, LEVELS[name]):
                choices = dataclasses.replace(
                    chosen,
                    micro_batches=k,
                    micro_batch_size=rows // k,
                    reshard_after_forward=reshard,
                )
                replica = config.replica if LEVELS[name].shards_opt_state else 1
                yield Option(name, replica, choices, dict(arguments))


def _reshards(chosen: Choices, level: Level) -> tuple[bool | int, ...]:
    """Where parameters rest divided both ways are tried, unless one was asked for."""
    if not level.shards_params:
        return (True,)
    asked = chosen.reshard_after_forward
    return (True, False) if asked is True else (asked,)


def copies_of(option: Option, target: Target) -> Iterator[Option]:
    """The same with copies of the divided state, so that a shard group is some of the hosts.

    Not where a number of copies was asked for.
    """
    if LEVELS[option.level].shards_opt_state and option.replica == 1:
        for replica in replicas_of(target)[1:]:
            yield dataclasses.replace(option, replica=replica)


def replicas_of(target: Target) -> tuple[int, ...]:
    """Copies of the divided state that suit a machine.

    A TPU slice is one group, divided axis by axis of its torus.
    """
    if target.platform != "gpu":
        return (1,)
    return tuple(n for n in range(1, target.hosts + 1) if target.hosts % n == 0)
