"""An explanation as text, the same in a terminal, a log and a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from gshard._util.errors import some
from gshard._util.tables import text_of, text_table
from gshard._util.units import bytes_of
from gshard.analysis.forecast_report import LevelForecast


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
class Beside:
    """Live arrays that are not the state's, of one shape, dtype and place.

    Attributes:
      shape: global shape.
      dtype: its name.
      lies: `on cpu:0`, `whole on 8 devices`, `divided over 8 devices`; `, on host` after it.
      count: arrays.
      bytes: on the device that holds most of them.
    """

    shape: tuple[int, ...]
    dtype: str
    lies: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Copy:
    """Live arrays that look like a part of the state, though they are not the state's.

    Attributes:
      of: `parameters`, `optimizer state` or `extras`.
      lies: as in `Beside`, or `on 8 devices`.
      count: arrays.
      shapes: the largest of them, in words.
      bytes: on one device, all of them.
    """

    of: str
    lies: str
    count: int
    shapes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Measured:
    """Bytes that are alive in this process.

    Attributes:
      state: by device the bytes of the state, by part as `plan.bytes_per_device` has them.
      differs: leaves whose bytes or place are not the plan's, in words; none: all is as planned.
      beside: live arrays that are not the state's, most bytes first.
      beside_bytes: the sum of them by device.
      copies: parts of a state among them.
      backend: by device what the backend says of its memory, where it says anything.
    """

    state: dict[str, dict[str, int]]
    differs: tuple[str, ...]
    beside: tuple[Beside, ...]
    beside_bytes: dict[str, int]
    copies: tuple[Copy, ...]
    backend: dict[str, dict[str, int]]


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


_BESIDE = 10  # rows of what is alive beside the state


def report(found: Explanation, most: int | None) -> str:
    """What holds most, what was measured beside the plan, every level, and short answers."""
    parts = ", ".join(f"{name} {bytes_of(n)}" for name, n in found.planned.items())
    title = (
        f"level {found.level} on {found.devices} devices, shard groups of {found.group_size}: "
        f"{bytes_of(found.at_rest)} at rest on each ({parts})"
    )
    blocks: list[Table | str] = [title, "", _leaves(found, most)]
    blocks += _measured(found)
    blocks += [_levels(found), _wire(found), "Answers", *_answers(found)]
    longest = max((len(x.path) for x in found.leaves), default=0)
    return text_of(blocks, width=160 + longest)


def _leaves(found: Explanation, most: int | None) -> Table:
    shown = found.leaves[:most]
    total = sum(x.bytes for x in found.leaves) or 1
    made = text_table(
        f"What holds most ({len(shown)} of {len(found.leaves)} arrays; * whole although the level "
        "divides)",
        ("array", "shape", "lies", "why"),
        ("bytes", "share", "divided it would spare", "padding"),
    )
    for x in shown:
        made.add_row(
            ("* " if x.marked else "") + x.path,
            f"{x.dtype}{list(x.shape)}",
            x.lies,
            (x.reason + (f"; to change: {x.change}" if x.change else "")),
            f"{x.bytes:,}",
            f"{x.bytes / total:.1%}",
            f"{x.spare:,}" if x.spare else "",
            f"{x.padding:,}" if x.padding else "",
        )
    rest = found.leaves[len(shown) :]
    if rest:
        bytes_left = sum(x.bytes for x in rest)
        made.add_row(f"{len(rest)} smaller ones", "", "", "", f"{bytes_left:,}",
                     f"{bytes_left / total:.1%}", f"{sum(x.spare for x in rest):,}",
                     f"{sum(x.padding for x in rest):,}")  # fmt: skip
    return made


def _measured(found: Explanation) -> Iterator[Table | str]:
    measured = found.measured
    if measured is None:
        yield "Nothing was measured: the state is abstract.\n"
        return
    backend = [x for x in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
               if any(x in row for row in measured.backend.values())]  # fmt: skip
    made = text_table(
        "Alive in this process, bytes by device",
        ("device",),
        (*found.planned, "beside the state", *(x.replace("_", " ") for x in backend)),
    )
    made.add_row("by the plan", *(f"{n:,}" for n in found.planned.values()))
    alike: dict[tuple[str, ...], list[str]] = {}
    for device, row in measured.state.items():
        said = measured.backend.get(device, {})
        amounts = (*row.values(), measured.beside_bytes.get(device, 0))
        amounts += tuple(said.get(x, 0) for x in backend)
        alike.setdefault(tuple(f"{n:,}" for n in amounts), []).append(device)
    for row, devices in alike.items():
        made.add_row(some(devices, most=3), *row)
    yield made
    if measured.differs:
        yield "The state does NOT lie as the plan says:"
        yield from (f"  {line}" for line in measured.differs[:_BESIDE])
        if len(measured.differs) > _BESIDE:
            yield f"  and {len(measured.differs) - _BESIDE} more"
        yield ""
    else:
        yield "The live bytes of the state are those of the plan, exactly, on every device.\n"
    yield from _beside(measured)


def _beside(measured: Measured) -> Iterator[Table | str]:
    if not measured.beside:
        yield "No other array is alive beside the state.\n"
        return
    count = sum(x.count for x in measured.beside)
    made = text_table(
        f"Alive beside the state: {count} array{'s' if count > 1 else ''}, by shape",
        ("shape", "lies"),
        ("arrays", "bytes on one device"),
    )
    for x in measured.beside[:_BESIDE]:
        shape = f"{x.dtype}{list(x.shape)}"
        made.add_row(shape, x.lies, f"{x.count:,}", f"{x.bytes:,}")
    rest = measured.beside[_BESIDE:]
    if rest:
        made.add_row(f"{len(rest)} other shapes", "", f"{sum(x.count for x in rest):,}", "")
    yield made


def _levels(found: Explanation) -> Table:
    several = f"{found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''}"
    made = text_table(
        f"The same state at every level, bytes on one device ({several} in a step)",
        ("level",),
        ("at rest", "saves", "gradients", "largest layer gathered", "host", "sent in a step"),
    )
    now = {found.level: f"{found.level} (now)"}
    for name, x in found.levels.items():
        amounts = (x.at_rest, found.saves(name), x.gradients, x.gathered, x.host, x.wire)
        made.add_row(now.get(name, name), *(f"{n:,}" for n in amounts))
    return made


def _wire(found: Explanation) -> Table:
    first = next(iter(found.wire.values()))
    made = text_table(
        f"Sent by one device in one step at level {found.level}, by way to accumulate",
        ("micro-batches",),
        ("as the level says", *list(first)[1:]),
    )
    for k, row in found.wire.items():
        made.add_row(str(k), *map(bytes_of, row.values()))
    return made


def _answers(found: Explanation) -> Iterator[str]:
    """To what is asked most, a line each."""
    yield "  " + _why_whole(found)
    for reason, same in groupby(
        sorted(found.marked, key=lambda x: (x.reason, x.change)), lambda x: (x.reason, x.change)
    ):
        yield f"    {_listed(list(same))}: {reason[0]}" + (
            f"; to change: {reason[1]}" if reason[1] else ""
        )
    by = found.halved_by
    yield "  Which level halves it? " + (
        f"{by}: {bytes_of(found.at_rest)} become {bytes_of(found.levels[by].at_rest)}."
        if by
        else f"None: {found.level} is at {bytes_of(found.at_rest)} already."
    )
    better = [name for name in found.levels if found.saves(name) > 0]
    yield "  What would a higher level save? " + (
        "; ".join(f"{name} {bytes_of(found.saves(name))} on each device" for name in better)
        or "Nothing more."
    )
    for name, why in found.cannot.items():
        yield f"  Level {name} is not possible for it: {why}"
    yield from _memory_answers(found.measured)


def _why_whole(found: Explanation) -> str:
    by_level: dict[str, int] = {}
    for x in found.leaves:
        if x.change.startswith("level "):
            by_level[x.change] = by_level.get(x.change, 0) + x.bytes
    kept = "".join(
        f"Level {found.level} keeps {bytes_of(size)} whole that {level} divides. "
        for level, size in by_level.items()
    )
    marked = sum(x.bytes for x in found.marked)
    others = (
        f"{len(found.marked)} arrays ({bytes_of(marked)}) are whole although the level divides:"
        if found.marked
        else "Nothing else is whole but single numbers."
        if kept
        else "Nothing is but single numbers."
    )
    return f"Why is it whole? {kept}{others}"


def _listed(leaves: list[Held]) -> str:
    return f"{some([x.path for x in leaves], most=3)} ({bytes_of(sum(x.bytes for x in leaves))})"


def _memory_answers(measured: Measured | None) -> Iterator[str]:
    if measured is None:
        return
    say = "  Why did memory not fall? "
    if not measured.beside:
        yield say + "Nothing is alive beside the state."
        return
    most = max(measured.beside_bytes.items(), key=lambda pair: pair[1])
    yield f"{say}{bytes_of(most[1])} on {most[0]} are alive beside the state."
    for copy in measured.copies:
        yield (
            f"    {copy.count} arrays {copy.lies} have the shapes of the {copy.of}, all of them "
            f"({some(copy.shapes)}): {bytes_of(copy.bytes)} on a device; {_MEANS[copy.of]}"
        )


_KEPT = "a state that was divided, or an earlier one, kept by a variable? It is freed by `del`."
_MEANS = {
    "parameters": f"{_KEPT} Or gradients, or a copy of your own?",
    "optimizer state": _KEPT,
    "non_trainable": _KEPT,
}
