"""`explain`: what holds the memory of a train state, and why it lies as it does."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import jax

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.pytree import flatten, same_leaves
from gshard._util.validation import shown
from gshard.analysis.choices import Choices
from gshard.analysis.explain_report import report
from gshard.analysis.level_forecast import LevelForecast, of_level
from gshard.analysis.live import Measured, measure
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.level import LEVELS
from gshard.sharding.plan import Plan, check_state, described
from gshard.sharding.rules import setting_of
from gshard.sharding.validate import refuse_donated
from gshard.train_state import OVERWRITTEN

_MICRO_BATCHES = (1, 2, 4, 8)  # for which the table of what is sent is made


@dataclass(frozen=True)
class Held:
    """One array of the state.

    Attributes:
      path: with the part of the state in front, such as `opt_state/inner/0/mu/Dense_0/kernel`.
      part: `params`, `opt_state`, `extras` or `step`.
      shape: logical.
      dtype: its name.
      lies: in words, such as `dim 0 / 8 + 3 padded` or `whole, on host`.
      bytes: at rest for one device, padding included.
      on_host: these lie in the host's memory.
      padding: of the bytes, zeros that make the dimension divisible (on average of the devices).
      spare: of the bytes, what dividing it would free; 0 where it is divided.
      reason: why it is whole, or divided in this way.
      change: what makes it lie otherwise; empty where nothing does.
      marked: it is whole although the level divides this part of the state.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    lies: str
    bytes: int
    on_host: bool
    padding: int
    spare: int
    reason: str
    change: str
    marked: bool


@dataclass(frozen=True)
class Explanation:
    """What holds the memory of a train state.

    Attributes:
      level: its name.
      devices: in all.
      group_size: devices in one shard group (N).
      leaves: every array of the state, most bytes first.
      planned: bytes for one device by part, `plan.bytes_per_device`.
      measured: what is alive; None for an abstract state.
      levels: the same state at every level, for a step of `micro_batches`.
      cannot: levels that this state cannot have, with the reason.
      wire: bytes that a device sends in a step, by number of micro-batches and by the way to
        accumulate: `level` (what the level says), `local`, `scatter`, `sync`, and `kept` (what was
        gathered stays for the backward pass).
      micro_batches: of the table of levels.
    """

    level: str
    devices: int
    group_size: int
    leaves: tuple[Held, ...]
    planned: dict[str, int]
    measured: Measured | None
    levels: dict[str, LevelForecast]
    cannot: dict[str, str]
    wire: dict[int, dict[str, int]]
    micro_batches: int

    @property
    def at_rest(self) -> int:
        """Bytes at rest in one device's memory, by the plan."""
        return self.levels[self.level].at_rest

    @property
    def exact(self) -> bool | None:
        """Whether every live byte of the state is where the plan has it; None: it is abstract."""
        return None if self.measured is None else not self.measured.differs

    @property
    def marked(self) -> tuple[Held, ...]:
        """Arrays that are whole although the level divides their part of the state."""
        return tuple(x for x in self.leaves if x.marked)

    def saves(self, level: str) -> int:
        """Bytes of one device's memory at rest that another level saves; less than 0: takes."""
        return self.at_rest - self.levels[level].at_rest

    @property
    def halved_by(self) -> str | None:
        """The first level at which this state takes half of the memory, or less."""
        return next(
            (name for name, x in self.levels.items() if 2 * x.at_rest <= self.at_rest), None
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything in dicts, lists, strings and numbers, ready for JSON."""
        found = {name: getattr(self, name) for name in ("level", "devices", "group_size")}
        return found | {
            "at_rest": self.at_rest,
            "exact": self.exact,
            "planned": dict(self.planned),
            "leaves": [dataclasses.asdict(x) for x in self.leaves],
            "measured": None if self.measured is None else dataclasses.asdict(self.measured),
            "micro_batches": self.micro_batches,
            "levels": {
                name: dataclasses.asdict(x) | {"at_rest": x.at_rest, "saves": self.saves(name)}
                for name, x in self.levels.items()
            },
            "cannot": dict(self.cannot),
            "halved_by": self.halved_by,
            "wire": {str(k): dict(row) for k, row in self.wire.items()},
        }

    def text(self, most: int | None = 20) -> str:
        """The explanation with so many arrays, those that hold most; None for all."""
        return report(self, most)

    def __str__(self) -> str:
        return self.text()


def explain(state: Any, plan: Plan | None = None, *, micro_batches: int = 1) -> Explanation:
    """Says what holds the memory of a train state, why it lies so, and what would change it.

    Nothing is moved or compiled. With several processes each one measures its own devices.

    Args:
      state: of `shard_train_state` or of a step, concrete or abstract; for NNX the
        `(model, optimizer)` pair, also one that Paddle's face wrapped.
      plan: of the state; by default the one that it carries.
      micro_batches: of one step, for what the levels take and send.

    Raises:
      GShardError: `shard_train_state` did not make this state, or a step has taken over its memory.
    """
    if plan is None:
        plan = plan_of(state, "explain")
    if not isinstance(plan, Plan):
        raise GShardError(
            f"explain(state, plan): plan is {shown(plan)}. Pass the plan that "
            "gshard.shard_train_state returned, or leave it out; an NNX model and its optimizer go "
            "in as one pair, explain((model, optimizer))."
        )
    check_state(state, plan, "explain(state, plan)")
    choices = Choices(micro_batches=micro_batches)
    parts = plan.kind.split(state)
    paths, leaves, _ = flatten(plan.layouts)
    same_leaves(parts, paths, "the state is")
    arrays = jax.tree.leaves(parts)
    refuse_donated(arrays)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    held = [_held(path, x, plan) for path, x in zip(paths, leaves, strict=True)]
    plans, cannot = _other_levels(plan)
    return Explanation(
        plan.level.name,
        plan.group.devices,
        plan.group.size,
        tuple(sorted(held, key=lambda x: -x.bytes)),
        plan.bytes_per_device,
        None if abstract else measure(parts, plan),
        {name: of_level(other, choices) for name, other in plans.items()},
        cannot,
        {k: _wire(plan, k) for k in sorted({*_MICRO_BATCHES, micro_batches})},
        micro_batches,
    )


def _held(path: str, layout: Layout, plan: Plan) -> Held:
    part, local = path.split("/")[0], layout.local()
    size = layout.bytes_per_device
    spare = 0 if layout.dim is not None or local.size < 2 else size - size // layout.group.size
    reason, change, marked = _why(path, layout, plan)
    return Held(
        path,
        part,
        layout.shape,
        str(layout.dtype),
        described(layout),
        size,
        layout.on_host,
        (local.stored_size - local.size) * layout.dtype.itemsize // layout.group.size,
        spare,
        reason,
        change,
        marked,
    )


def _why(path: str, layout: Layout, plan: Plan) -> tuple[str, str, bool]:
    """Why a leaf is whole or divided, what changes that, and whether it is to be marked."""
    part = path.split("/")[0]
    if layout.dim is not None:
        return layout.reason, "", False
    if layout.local().size < 2:
        return "a single number", "", False
    if path.startswith(f"extras/{OVERWRITTEN}/"):
        return "what the loss returns for it takes its place", "", False
    state = part == "opt_state"
    if not (plan.level.divides_state if state else plan.level.divides_params):
        by = (x.name for x in LEVELS.values() if (x.divides_state if state else x.divides_params))
        return f"level {plan.level.name} keeps it whole on every device", f"level {next(by)}", False
    return layout.reason, setting_of(layout.reason), bool(plan.group.size > 1)


def _other_levels(plan: Plan) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plans of the same state at every level, and why there is none at some."""
    plans: dict[str, Plan] = {}
    cannot: dict[str, str] = {}
    with warnings.catch_warnings():  # they were said when the state was divided
        warnings.simplefilter("ignore", GShardWarning)
        for name, level in LEVELS.items():
            try:
                plans[name] = plan if level is plan.level else plan.at(level)
            except GShardError as error:  # such as a rule that divides layers
                cannot[name] = str(error)
    return plans, cannot


def _wire(plan: Plan, micro_batches: int) -> dict[str, int]:
    found = of_level(plan, Choices(micro_batches=micro_batches))
    return {"level": found.wire, **found.wire_by_flavour}
