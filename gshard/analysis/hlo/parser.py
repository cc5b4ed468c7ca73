"""Parses HLO text into shapes, instructions and computations.

Reads what `jax.stages.Compiled.as_text()` gives on CPU, GPU and TPU. Nothing here knows what a
collective is; `program` does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from gshard._util.errors import GShardError

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]')
_SEPARATORS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],:]')
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\]]*)\](?:\{([^{}]*)\})?")
_PACKED_BITS = re.compile(r"\bE\((\d+)\)")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*)?\{$")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: XLA's name of its dtype, and how many bits an element takes in memory.

    Of a bounded dynamic dimension the bound counts.
    """

    dtype: str
    elements: int
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes in memory, without the padding of a tiled layout."""
        return -(-self.elements * self.bits // 8)


def read_sizes(shape: str) -> tuple[int, ...]:
    """Returns the sizes of the dimensions of an array, from the text of its shape."""
    found = _ARRAY.search(_COMMENT.sub("", shape))
    sizes = found[2].split(",") if found else []
    return tuple(int(size.strip().removeprefix("<=")) for size in sizes if size.strip())


def read_arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays in a shape's text, in order, nested tuples flattened, without tokens.

    Layouts are read only for `E(n)`, the bits of a packed element. Types narrower than a byte that
    are not packed take one byte each, as `pred` does.
    """
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(_COMMENT.sub("", shape)):
        if dtype in ("token", "opaque"):
            continue
        sizes = [int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip()]
        packed = _PACKED_BITS.search(layout)
        width = re.search(r"\d+", dtype)  # the first number: bf16, s4, f8e4m3fn
        bits = int(packed[1]) if packed else max(8, int(width.group())) if width else 8
        arrays.append(Array(dtype, math.prod(sizes), bits))
    return tuple(arrays)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = shape opcode(arguments), attributes`.

    Only a few instructions of a program matter: `operands` and `attributes` read the text if asked.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    attribute_text: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands (meaningless for `parameter` and `constant`)."""
        parts = split_top_level(_COMMENT.sub("", self.arguments))
        return tuple(part.split()[-1].removeprefix("%") for part in parts)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The raw text of each attribute, by name."""
        pairs = (part.partition("=") for part in split_top_level(self.attribute_text))
        return {name.strip(): value.strip() for name, equals, value in pairs if equals}

    @property
    def op_name(self) -> str:
        """The JAX name stack in `metadata`, or the empty string."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found.group(1) if found else ""

    def names(self, attribute: str) -> tuple[str, ...]:
        """Returns the computations that an attribute names, `%a` or `{%a, %b}`."""
        value = self.attributes.get(attribute, "").strip("{}")
        return tuple(name.strip().removeprefix("%") for name in value.split(",") if name.strip())


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module: its header line, its computations and the name of the entry."""

    header: str
    computations: dict[str, Computation]
    entry: str


def read_module(text: str) -> Module:
    """Reads HLO text; raises a `GShardError` if it is not an HLO module."""
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    computations: dict[str, Computation] = {}
    entry = None
    name, instructions = None, []
    for line in lines:
        if name is None:
            start = _COMPUTATION.match(line)
            if start and line is not header:
                name, instructions = start.group(2), []
                entry = name if start.group(1) else entry
        elif line.startswith("}"):
            if instructions:
                computations[name] = Computation(name, tuple(instructions))
            name = None
        else:
            instruction = _read_instruction(line)
            if instruction is not None:
                instructions.append(instruction)
    if header is None or entry not in computations:
        raise GShardError(
            "this text is not an HLO module with an ENTRY computation; "
            "pass what compiled.as_text() returns"
        )
    return Module(header, computations, entry)


def _read_instruction(line: str) -> Instruction | None:
    """Reads one line; returns None for a line that only continues a long constant."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, rest = match.groups()
    shape_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, shape_end)
    if opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    return Instruction(
        name=name,
        shape=rest[:shape_end],
        opcode=opcode.group(1),
        arguments=rest[opcode.end() : end - 1],
        attribute_text=rest[end:].lstrip(", "),
        is_root=root is not None,
    )


def _depths(pattern: re.Pattern[str], text: str, start: int) -> Iterator[tuple[re.Match[str], int]]:
    """Yields the tokens of a text from `start`, and how many brackets are open after each."""
    depth = 0
    for token in pattern.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        yield token, depth


def _closing(text: str, start: int) -> int:
    """Returns the index just past the bracket that closes the one at `start`."""
    tokens = _depths(_BRACKETS, text, start)
    return next((token.end() for token, depth in tokens if depth == 0), len(text))


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """Splits at the commas, or colons, that are outside brackets and strings."""
    parts, start = [], 0
    for token, depth in _depths(_SEPARATORS, text, 0):
        if token.group() == separator and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


Groups = tuple[tuple[int, ...], ...]

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\}[,\s]*)*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{}]*)\))?\s*\{([^{}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\s*\d+\}[,\s]*)*)\}")
_BRACED = re.compile(r"\{([^{}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def read_groups(instruction: Instruction) -> Groups | None:
    """Returns the groups of logical device ids, or None when all devices form one group.

    A logical id is an index into `mesh.devices.flat` of the mesh that JAX compiles for. The three
    notations:
      * explicit: `{{0,1},{2,3}}`;
      * iota: `[2,4]<=[4,2]T(1,0)`, the numbers 0..7 shaped (4, 2), transposed, shaped (2, 4);
      * mesh: `mesh['a'=2,'b'=4] {'b'}`, one group for each way to fix the axes not named. An axis
        may be split, `'b':(2)2` being the factor of size 2 after a factor of 2; devices in another
        order are `device_ids=([4,2]T(1,0))` or `device_ids=(0,2,..)`.

    Devices that are linked by a chain of a collective-permute's pairs form one group.
    """
    text = instruction.attribute_text
    if instruction.opcode.startswith("collective-permute"):
        pairs = read_pairs(instruction)
        return _linked(pairs) if pairs else None
    if mesh := _MESH.search(text):
        return _mesh_groups(*mesh.groups())
    if iota := _IOTA.search(text):
        return _rows(_iota(iota[1]))
    explicit = _EXPLICIT.search(text)
    return _read_lists(explicit[1]) or None if explicit else None


def read_pairs(instruction: Instruction) -> Groups | None:
    """Returns source and target of each transfer of a collective-permute; None of anything else."""
    pairs = _PAIRS.search(instruction.attribute_text)
    return _read_lists(pairs[1]) if pairs else None


def _read_lists(text: str) -> Groups:
    return tuple(_numbers(inner) for inner in _BRACED.findall(text) if inner.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.reshape(-1, ids.shape[-1]).tolist()))


def _iota(text: str) -> np.ndarray:
    """Reads `[shape]<=[source]T(order)` as an array; `[shape]T(order)` is its own source."""
    lists = [_numbers(inner) for inner in re.findall(r"\[([\d,]+)\]", text)]
    ids = np.arange(math.prod(lists[-1])).reshape(lists[-1])
    if order := re.search(r"T\(([\d,]+)\)", text):
        ids = ids.transpose(_numbers(order[1]))
    return ids.reshape(lists[0]) if len(lists) == 2 else ids


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    names = [(name, int(size)) for name, size in _MESH_AXIS.findall(axes)]
    sizes = dict(names)
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif "[" in device_ids:
        ids = _iota(device_ids).reshape(-1)
    else:
        ids = np.array(_numbers(device_ids))
    taken = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in _GROUP_AXIS.findall(grouped)
    ]
    # Every axis becomes its factors, cut wherever a named part begins or ends.
    shape, positions = [], {}
    for name, size in names:
        cuts = {1, size}
        for _, pre, part in (item for item in taken if item[0] == name):
            cuts |= {pre, pre * part}
        ordered = sorted(cuts)
        for low, high in zip(ordered, ordered[1:], strict=False):
            positions[name, low, high] = len(shape)
            shape.append(high // low)
    members = [
        position
        for name, pre, part in taken
        for (axis, low, high), position in positions.items()
        if axis == name and pre <= low and high <= pre * part
    ]
    rest = [position for position in range(len(shape)) if position not in members]
    group = math.prod(shape[position] for position in members)
    return _rows(ids.reshape(shape).transpose(rest + members).reshape(-1, group))


def _linked(pairs: Groups) -> Groups | None:
    """Joins pairs that share a device into sorted groups."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set().union(*(group_of.get(device, {device}) for device in pair))
        group_of.update(dict.fromkeys(joined, joined))
    groups = {min(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(groups[first] for first in sorted(groups)) or None
