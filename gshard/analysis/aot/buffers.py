"""What a program keeps in a device's memory, from the files that XLA writes while it compiles it.

XLA writes them for every backend, also where the program turns out too large for a TPU and there
is no compiled program to ask. Three of them are read: the buffer assignment (all allocations, and
which values share one), the live ranges (which values are alive where memory peaks), and the
optimized program (where a value comes from).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gshard.analysis.hlo import read_program
from gshard.analysis.hlo.parser import read_module

_ASSIGNMENT, _RANGES, _PROGRAM = (
    f"*after_optimizations{end}" for end in ("-buffer-assignment.txt", "-live-range.txt", ".txt")
)
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+),(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_ALIVE = re.compile(r"    (\S+?)\{([\d,]*)\}: (\d+) bytes")
_COLOR = re.compile(r"color (\d+)")
_LAYOUT = re.compile(r"\{[^}]*\}")
_CALL = re.compile(r"jit\(\w+\)/(shard_map/)?")
# A TPU counts its memories on the chip beside the one that programs fill, 0; a GPU has only that of
# the device, under several numbers. The host's is 5 on both.
_HOST = 5


class _Place(NamedTuple):
    """Where a value lies."""

    allocation: int
    offset: int
    size: int
    shape: str


@dataclass(frozen=True)
class CompiledBuffer:
    """Values of one shape and origin that are alive where memory peaks.

    Attributes:
      bytes: of each.
      count: how many.
      shape: such as `f32[16,4096]`.
      what: the operation that makes it, or the argument that it is.
    """

    bytes: int
    count: int
    shape: str
    what: str


@dataclass(frozen=True)
class CompiledMemory:
    """A program's memory on one device.

    Attributes:
      arguments: bytes of what the program is given.
      peak: bytes of all allocations.
      largest: what is alive at the peak, the most bytes first.
      text: the optimized program.
    """

    arguments: int
    peak: int
    largest: tuple[CompiledBuffer, ...]
    text: str


def read_buffers(folder: Path, platform: str, names: Mapping[str, str]) -> CompiledMemory | None:
    """Reads what XLA left in the folder of `xla_dump_to`; None where it wrote nothing.

    Args:
      folder: with the files of one program.
      platform: `cpu`, `gpu` or `tpu`.
      names: what to call an argument, by the program's name of it, such as `leaves[2]`.
    """
    texts = []
    for name in (_ASSIGNMENT, _RANGES, _PROGRAM):
        found = sorted(folder.glob(name))
        if not found:
            return None
        texts.append(found[-1].read_text())
    assignment, ranges, program = texts
    arguments = peak = 0
    places: dict[tuple[str, str], _Place] = {}  # by the value's name and index
    number = -1
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            number, size, rest = int(found[1]), int(found[2]), found[3]
            if "thread-local" not in rest and _on_device(rest, platform):
                peak += size
                arguments += size if " parameter " in rest else 0
            else:
                number = -1
        elif (found := _VALUE.match(line)) and number >= 0:
            name, index, size, offset, shape = found.groups()
            place = _Place(number, int(offset), int(size), _LAYOUT.sub("", shape))
            places[name, (index or "{}")[1:-1]] = place
    return CompiledMemory(
        arguments, peak, _largest(ranges, places, _origins(program), names), program
    )


def _on_device(allocation: str, platform: str) -> bool:
    color = _COLOR.search(allocation)
    space = int(color[1]) if color else 0
    return space != _HOST if platform == "gpu" else space == 0


def _origins(program: str) -> dict[str, str]:
    """The op_name of every instruction."""
    return {
        instruction.name: instruction.op_name
        for computation in read_module(program).computations.values()
        for instruction in computation.instructions
    }


def _largest(
    ranges: str,
    places: Mapping[tuple[str, str], _Place],
    origins: Mapping[str, str],
    names: Mapping[str, str],
) -> tuple[CompiledBuffer, ...]:
    """What is alive at the peak, each place in memory once: a loop hands on what its body made."""
    _, _, rest = ranges.partition("(peak):\n")
    alive: dict[tuple[int, int], _Place] = {}
    made_by: dict[_Place, list[str]] = {}
    for line in rest.splitlines():
        found = _ALIVE.match(line)
        if not found:
            break
        if place := places.get((found[1], found[2])):
            known = alive.setdefault(place[:2], place)
            alive[place[:2]] = max(known, place, key=lambda x: x.size)
            made_by.setdefault(place, []).append(found[1])
    sharing: dict[_Place, list[str]] = {}
    for (name, _), place in places.items():
        sharing.setdefault(place, []).append(name)
    counts: dict[tuple[int, str, str], int] = {}
    for place in alive.values():
        candidates = [_origin(name, origins) for name in made_by[place]]
        if all(map(_hands_on, candidates)):
            candidates += [_origin(name, origins) for name in sharing[place]]
        what = min(candidates, key=lambda what: (_hands_on(what), -len(what)))
        key = (place.size, place.shape, names.get(what, what))
        counts[key] = counts.get(key, 0) + 1
    found = [
        CompiledBuffer(size, count, shape, what) for (size, shape, what), count in counts.items()
    ]
    return tuple(sorted(found, key=lambda x: -x.bytes * x.count))


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """The operation of the user's program, or else the compiler's own word."""
    origin = _CALL.sub("", origins.get(name, ""))
    return origin if "/" in origin or "[" in origin else (origin or name).split(".")[0]


def _hands_on(what: str) -> bool:
    """Whether it is the loop around a value, or nothing that a user wrote."""
    return what.endswith("/while") or not ("/" in what or "[" in what)


def traffic(text: str) -> dict[str, dict[str, int | None]]:
    """Bytes that one device sends in one step by the ring algorithms, by kind of collective.

    Returns:
      `wire_bytes`, and `asynchronous_bytes` of those collectives that overlap with computation.
      None where a collective lies in a loop whose length the program does not tell.
    """
    wire: dict[str, int | None] = defaultdict(int)
    overlapped: dict[str, int | None] = defaultdict(int)
    for collective in read_program(text).collectives:
        if collective.group_size > 1:
            moved = collective.wire_bytes
            _add(wire, collective.kind, moved)
            _add(overlapped, collective.kind, moved if collective.asynchronous else 0)
    return {"wire_bytes": dict(wire), "asynchronous_bytes": dict(overlapped)}


def _add(sums: dict[str, int | None], kind: str, amount: int | None) -> None:
    known = sums[kind]
    sums[kind] = None if known is None or amount is None else known + amount
