"""An explanation as text, the same in a terminal, a log and a file."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from gshard._util.errors import GShardError, some
from gshard._util.text import bytes_of, text_of, text_table
from gshard.analysis.forecast_report import LevelForecast
from gshard.sharding.level import parse_level


@dataclass(frozen=True)
class StateArray:
    """One array of the train state.

    Attributes:
      path: starts with the part of the state, such as `opt_state/inner/0/mu/Dense_0/kernel`.
      part: `params`, `opt_state`, `non_trainable` or `step`.
      shape: the logical shape, without padding.
      dtype: name of the dtype.
      placement: readable layout, such as `dim 0 / 8 + 3 padded` or `replicated, on host`.
      bytes: stored for one device between steps, padding included.
      on_host: whether these bytes are in the host's memory.
      padding: how many of the bytes are padding, averaged over the devices.
      saved_if_sharded: bytes of one device that sharding would free; 0 if it is sharded.
      reason: why it is replicated, or sharded along this dimension.
      change: the setting that changes its layout; empty if none does.
      marked: whether it is replicated although the level shards its part of the state.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    bytes: int
    on_host: bool
    padding: int
    saved_if_sharded: int
    reason: str
    change: str
    marked: bool


@dataclass(frozen=True)
class OtherArrays:
    """Live arrays that do not belong to the state, of one shape, dtype and placement.

    Attributes:
      shape: global shape.
      dtype: name of the dtype.
      placement: such as `on cpu:0` or `sharded over 8 devices, on host`.
      count: number of arrays.
      bytes: their bytes on the device that has most of them.
    """

    shape: tuple[int, ...]
    dtype: str
    placement: str
    count: int
    bytes: int


@dataclass(frozen=True)
class StateCopy:
    """Other live arrays that together have the shapes of a complete component of the state.

    Attributes:
      of: `parameters`, `optimizer state` or `non_trainable`.
      placement: as in `OtherArrays`, or `on 8 devices`.
      count: number of arrays.
      shapes: the largest of them, such as `2 x float32[64, 64]`.
      bytes: all their bytes on one device.
    """

    of: str
    placement: str
    count: int
    shapes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Measured:
    """The live arrays of this process.

    Attributes:
      state: bytes of the state, by device and then by part, as in `plan.bytes_per_device`.
      differences: a readable message for each leaf whose bytes or placement differ from the plan.
      other_arrays: live arrays that do not belong to the state, largest bytes first.
      other_bytes: bytes of these, by device.
      copies: copies of parts of a state among these arrays.
      backend: memory statistics of the backend, by device; empty if it has none.
    """

    state: dict[str, dict[str, int]]
    differences: tuple[str, ...]
    other_arrays: tuple[OtherArrays, ...]
    other_bytes: dict[str, int]
    copies: tuple[StateCopy, ...]
    backend: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Explanation:
    """What takes the memory of a train state, why, and what would change it; print it.

    Attributes:
      level: name of the state's level.
      devices: number of devices.
      group_size: devices in one shard group (N).
      leaves: every array of the state, largest bytes first.
      planned: bytes of one device by part of the state, `plan.bytes_per_device`.
      measured: the live arrays of this process; None for an abstract state.
      levels: forecasts of the same state by level, for a step of `micro_batches`.
      impossible: reasons by name of the levels that this state cannot have.
      wire: bytes that one device sends in a step, by number of micro-batches and then by the way
        gradients accumulate: `level` (the level's own), `local`, `scatter`, `sync`, and `kept`
        (gathered parameters are kept for the backward pass).
      micro_batches: number of micro-batches in `levels`.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "os", min_shard_size=0
      ... )
      >>> found = gshard.explain(state)
      >>> found.exact, found.saves("p_g_os") > 0
      (True, True)
      >>> found.measured.copies[0].of  # `params` is still alive
      'parameters'
    """

    level: str
    devices: int
    group_size: int
    leaves: tuple[StateArray, ...]
    planned: dict[str, int]
    measured: Measured | None
    levels: dict[str, LevelForecast]
    impossible: dict[str, str]
    wire: dict[int, dict[str, int]]
    micro_batches: int

    @property
    def stored(self) -> int:
        """Bytes of the state that one device stores between steps, by the plan."""
        return self.levels[self.level].stored

    @property
    def exact(self) -> bool | None:
        """Whether the live bytes of the state are those of the plan; None for an abstract state."""
        return None if self.measured is None else not self.measured.differences

    @property
    def marked(self) -> tuple[StateArray, ...]:
        """Arrays that are replicated although the level shards their part of the state."""
        return tuple(x for x in self.leaves if x.marked)

    def saves(self, level: str) -> int:
        """Bytes that one device stores less at another level; negative if it stores more.

        Raises:
          GShardError: the state cannot have this level.
        """
        name = parse_level(level).name
        if name in self.impossible:
            raise GShardError(
                f"level {name} is not possible for this state: {self.impossible[name]}"
            )
        return self.stored - self.levels[name].stored

    @property
    def halved_by(self) -> str | None:
        """The first level at which a device stores at most half of the bytes; None if none does."""
        return next((name for name, x in self.levels.items() if 2 * x.stored <= self.stored), None)

    def as_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self) | {
            "stored": self.stored,
            "exact": self.exact,
            "halved_by": self.halved_by,
            "levels": {
                name: dataclasses.asdict(x) | {"stored": x.stored, "saves": self.saves(name)}
                for name, x in self.levels.items()
            },
            "wire": {str(k): row for k, row in self.wire.items()},
        }

    def text(self, most: int | None = 20) -> str:
        """The explanation as text, with the `most` largest arrays; None for all of them."""
        return explanation_text(self, most)

    def __str__(self) -> str:
        return self.text()


_MOST = 10  # rows of other live arrays, and of differences from the plan


def explanation_text(found: Explanation, most: int | None) -> str:
    """The largest arrays, the live bytes, all levels, and short answers."""
    parts = ", ".join(f"{k} {bytes_of(n)}" for k, n in found.planned.items() if k != "host")
    host = found.planned["host"]
    title = (
        f"level {found.level} on {found.devices} devices, shard groups of {found.group_size}: "
        f"{bytes_of(found.stored)} stored on each ({parts})"
        + (f", and {bytes_of(host)} in host memory for each device" if host else "")
    )
    blocks: list[Table | str] = [title, "", _arrays_table(found, most), *_live_blocks(found)]
    blocks += [_levels_table(found), _wire_table(found), "Answers", *_answers(found)]
    return text_of(blocks, width=160 + max((len(x.path) for x in found.leaves), default=0))


def _arrays_table(found: Explanation, most: int | None) -> Table:
    shown, total = found.leaves[:most], sum(x.bytes for x in found.leaves) or 1
    made = text_table(
        f"Largest arrays ({len(shown)} of {len(found.leaves)} arrays; * replicated, although "
        "this level shards such arrays)",
        ("array", "shape", "layout", "why"),
        ("bytes", "share", "saved if sharded", "padding"),
    )

    def add(names: tuple[str, ...], arrays: Sequence[StateArray]) -> None:
        size, saved, padding = (
            sum(getattr(x, name) for x in arrays)
            for name in ("bytes", "saved_if_sharded", "padding")
        )
        amounts = (f"{n:,}" if n else "" for n in (saved, padding))
        made.add_row(*names, f"{size:,}", f"{size / total:.1%}", *amounts)

    for x in shown:
        why = x.reason + (f"; to change: {x.change}" if x.change else "")
        name = f"* {x.path}" if x.marked else x.path
        add((name, f"{x.dtype}{list(x.shape)}", x.placement, why), [x])
    if rest := found.leaves[len(shown) :]:
        add((f"{len(rest)} smaller ones", "", "", ""), rest)
    return made


def _live_blocks(found: Explanation) -> Iterator[Table | str]:
    measured = found.measured
    if measured is None:
        yield "Nothing was measured: the state is abstract.\n"
        return
    backend = [x for x in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
               if any(x in row for row in measured.backend.values())]  # fmt: skip
    made = text_table(
        "Alive in this process, bytes by device",
        ("device",),
        (*found.planned, "other arrays", *(x.replace("_", " ") for x in backend)),
    )
    made.add_row("by the plan", *(f"{n:,}" for n in found.planned.values()))
    alike: dict[tuple[str, ...], list[str]] = {}
    for device, row in measured.state.items():
        stats = measured.backend.get(device, {})
        amounts = (*row.values(), measured.other_bytes.get(device, 0))
        amounts += tuple(stats.get(x, 0) for x in backend)
        alike.setdefault(tuple(f"{n:,}" for n in amounts), []).append(device)
    for row, devices in alike.items():
        made.add_row(some(devices, most=3), *row)
    yield made
    if measured.differences:
        yield "The state is NOT placed as planned:"
        yield from (f"  {line}" for line in measured.differences[:_MOST])
        if len(measured.differences) > _MOST:
            yield f"  and {len(measured.differences) - _MOST} more"
        yield ""
    else:
        yield "The live bytes of the state equal the plan exactly, on every device.\n"
    if not measured.other_arrays:
        yield "No other array is alive.\n"
        return
    count = sum(x.count for x in measured.other_arrays)
    made = text_table(
        f"Other live arrays: {count} array{'s' if count > 1 else ''}, by shape",
        ("shape", "layout"),
        ("arrays", "bytes on one device"),
        [(f"{x.dtype}{list(x.shape)}", x.placement, f"{x.count:,}", f"{x.bytes:,}")
         for x in measured.other_arrays[:_MOST]],
    )  # fmt: skip
    if rest := measured.other_arrays[_MOST:]:
        made.add_row(f"{len(rest)} other shapes", "", f"{sum(x.count for x in rest):,}", "")
    yield made


def _levels_table(found: Explanation) -> Table:
    several = f"{found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''}"
    made = text_table(
        f"The same state at every level, bytes on one device ({several} in a step)",
        ("level",),
        ("stored", "saves", "gradients", "largest layer gathered", "host", "sent at most"),
    )
    labels = {found.level: f"{found.level} (now)"}
    for name, x in found.levels.items():
        amounts = (x.stored, found.saves(name), x.gradients, x.gathered, x.host, x.wire)
        made.add_row(labels.get(name, name), *(f"{n:,}" for n in amounts))
    return made


def _wire_table(found: Explanation) -> Table:
    first = next(iter(found.wire.values()))
    return text_table(
        "Most that one device sends in one step for parameters and gradients at level "
        f"{found.level}, by way to accumulate",
        ("micro-batches",),
        ("as the level says", *list(first)[1:]),
        [(str(k), *map(bytes_of, row.values())) for k, row in found.wire.items()],
    )


def _causes(found: Explanation) -> Iterator[str]:
    """Says why arrays are replicated, in a line for each cause."""
    levels = {f"level {name}" for name in found.levels}
    by_level, never = Counter[str](), list[StateArray]()
    for x in found.leaves:
        if x.change in levels:
            by_level[x.change] += x.bytes
        elif x.saved_if_sharded and not x.marked:
            never.append(x)
    said = [
        f"Level {found.level} replicates {bytes_of(size)} that {level} shards."
        for level, size in by_level.items()
    ]
    groups = [(found.marked, "replicated although this level shards that part of the state"),
              (never, "replicated at every level")]  # fmt: skip
    if found.group_size == 1:
        said.append("There is one device in the shard group.")
    elif not found.marked and not never:
        said.append(f"All {'other ' if said else ''}arrays are sharded, except scalars.")
    head = " ".join(["  Why is it replicated?", *said])

    def cause(x: StateArray) -> tuple[str, str]:
        return x.reason, x.change

    for arrays, what in groups:
        if arrays:
            count, size = len(arrays), bytes_of(sum(x.bytes for x in arrays))
            few = f"array ({size}) is" if count == 1 else f"arrays ({size}) are"
            yield f"{head or ' '} {count} {few} {what}:"
            head = ""
        for (reason, change), same in groupby(sorted(arrays, key=cause), cause):
            leaves = list(same)
            paths, size = some([x.path for x in leaves], most=3), sum(x.bytes for x in leaves)
            how = f"; to change: {change}" if change else ""
            yield f"    {paths} ({bytes_of(size)}): {reason}{how}"
    if head:
        yield head


def _answers(found: Explanation) -> Iterator[str]:
    """Answers to the most frequent questions, one line each."""
    yield from _causes(found)
    by, now = found.halved_by, bytes_of(found.stored)
    halves = f"{by}: {now} become {bytes_of(found.levels[by].stored)}" if by else ""
    least = min(found.levels, key=lambda name: found.levels[name].stored)
    none = f"None: {now} now, and {bytes_of(found.levels[least].stored)} at {least}, the smallest"
    if not any(map(found.saves, found.levels)):
        none = f"None: it is {now} at every level"
    yield f"  Which level halves it? {halves or none}."
    saved = {name: found.saves(name) for name in found.levels if found.saves(name) > 0}
    better = "; ".join(f"{name} {bytes_of(n)} on each device" for name, n in saved.items())
    yield f"  What would a higher level save? {better or 'Nothing more.'}"
    for name, why in found.impossible.items():
        yield f"  Level {name} is not possible for it: {why}"
    measured = found.measured
    if measured is None:
        return
    others = "No other array is alive."
    if measured.other_arrays:
        device, size = max(measured.other_bytes.items(), key=lambda pair: pair[1])
        others = f"{bytes_of(size)} on {device} belong to other live arrays."
    yield f"  Why did memory not fall? {others}"
    for copy in measured.copies:
        gradients = " Or are they gradients, or a copy of your own?"
        yield (
            f"    {copy.count} arrays {copy.placement} have the shapes of the {copy.of}, "
            f"all of them ({some(copy.shapes)}): {bytes_of(copy.bytes)} on a device; does a "
            "variable keep the state from before sharding, or an earlier one? `del` frees it."
            f"{gradients if copy.of == 'parameters' else ''}"
        )
