"""`advise`: which level, mesh, micro-batches, offload and remat fit a machine, fastest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gshard._util.errors import GShardError
from gshard.analysis.aot.target import Target
from gshard.analysis.config import Config
from gshard.analysis.cost_model import Cost, cost
from gshard.analysis.forecast import abstract_mesh
from gshard.analysis.level_forecast import LevelForecast, of_level
from gshard.analysis.memory.footprint import Footprint
from gshard.analysis.options import Option, copies_of, options_of
from gshard.analysis.setup import Setup, batch_bytes, divided, load_setup, without_arrays
from gshard.analysis.traced import footprint_of
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
    setups: dict[str, Setup] = {}

    def setup_of(option: Option) -> Setup:
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


def _repeats(setup: Setup, target: Target, option: Option) -> bool:
    """Whether an option keeps what was gathered and gathers nothing, as the one that does not."""
    if option.choices.reshard_after_forward is not False:
        return False
    mesh = abstract_mesh(target.devices, option.replica)
    return not divided(setup, mesh, option.level, option.choices)[1].gathers


def best_of_each(found: Sequence[Verdict]) -> list[Verdict]:
    """The first of those that differ in copies and micro-batches alone."""
    first = {x.option.kind: x for x in reversed(found)}
    return [x for x in found if x is first[x.option.kind]]


def ranked(found: Sequence[Verdict]) -> list[Verdict]:
    """Those that fit by time, the others by what they need; of equal ones what needs less first."""

    def order(x: Verdict) -> tuple[bool, float, int]:
        return x.cost is None, 0.0 if x.cost is None else float(f"{x.cost.step:.3g}"), x.needs

    return sorted(found, key=order)


def _judged(setup: Setup, target: Target, option: Option) -> list[Verdict]:
    """The verdict on an option; where it does not fit, with the state on the host beside it."""
    first = _verdict(setup, target, option)
    if first.fits or option.choices.offload:
        return [first]
    away = dataclasses.replace(option.choices, offload=True)
    second = _verdict(setup, target, dataclasses.replace(option, choices=away))
    return [first, second] if second.host else [first]


def _verdict(setup: Setup, target: Target, option: Option) -> Verdict:
    choices, has = option.choices, target.chip.usable or 0
    mesh = abstract_mesh(target.devices, option.replica)
    state, plan = divided(setup, mesh, option.level, choices)
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
    wire: dict[str, int] = dict.fromkeys(("shard", "copies", "publish"), 0)
    for row in seen.collectives:
        if row.kind == "all-gather" and not at_rest:
            wire["publish"] += row.wire_bytes
        elif row.kind == "all-reduce" and plan.group.copies > 1:
            wire["copies"] += row.wire_bytes
        else:
            wire["shard"] += row.wire_bytes
    # Moments and master copies are read and written, parameters written, gradients read: a part of
    # the traffic of the whole step, for which nothing is computed beside.
    update = 2 * level.optimizer + level.params + level.gradients
    rest = max(0, seen.traffic - update)
    return cost(target, plan.group, seen.flops, rest, wire, update, level.host)
