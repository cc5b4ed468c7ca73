"""HLO text as data: shapes, instructions, computations.

Reads what `jax.stages.Compiled.as_text()` gives on CPU, GPU and TPU. Nothing here knows what a
collective is; `program` does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cached_property

from gshard._util.errors import GShardError

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]')
_BRACKETS_AND_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_COMMENT = re.compile(r"/\*.*?\*/")
_LAYOUT = re.compile(r"\{([^{}]*)\}")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\]]*)\](?:\{([^{}]*)\})?")
_PACKED_BITS = re.compile(r"\bE\((\d+)\)")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*)?\{$")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      dtype: XLA's name, such as `f32`, `bf16`, `s4`, `pred`.
      elements: number of elements (of a bounded dynamic dimension, the bound).
      bits: bits that one element takes in memory.
    """

    dtype: str
    elements: int
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes in memory, without the padding of a tiled layout."""
        return -(-self.elements * self.bits // 8)


def read_arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays in a shape's text, in order, nested tuples flattened.

    Layouts such as `{1,0:T(8,128)(2,1)S(1)}` are read only for `E(n)`, the bits of a packed
    element. Types narrower than a byte that are not packed take one byte each, as `pred` does.
    Tokens and opaque values are no arrays and are left out.
    """
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(_COMMENT.sub("", shape)):
        if dtype in ("token", "opaque"):
            continue
        sizes = [int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip()]
        packed = _PACKED_BITS.search(layout)
        bits = int(packed.group(1)) if packed else max(8, _dtype_bits(dtype))
        arrays.append(Array(dtype, math.prod(sizes), bits))
    return tuple(arrays)


def _dtype_bits(dtype: str) -> int:
    """Width of a dtype in bits: the first number in its name (`bf16`, `s4`, `f8e4m3fn`, `c64`)."""
    width = re.search(r"\d+", dtype)
    return int(width.group()) if width else 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = shape opcode(arguments), attributes`.

    `arguments` and `attribute_text` are the raw text; `operands` and `attributes` read it when
    asked, since only a few instructions of a program matter.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    attribute_text: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands (meaningless for `parameter` and `constant`)."""
        parts = split_top_level(_COMMENT.sub("", self.arguments))
        return tuple(part.split()[-1].removeprefix("%") for part in parts)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attribute name to its raw text."""
        pairs = (part.partition("=") for part in split_top_level(self.attribute_text))
        return {name.strip(): value.strip() for name, equals, value in pairs if equals}

    @property
    def op_name(self) -> str:
        """The JAX name stack in `metadata`, or the empty string."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found.group(1) if found else ""

    def names(self, attribute: str) -> tuple[str, ...]:
        """Computations named by an attribute, `%a` or `{%a, %b}`."""
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
    """A whole HLO module: its header line, its computations and the name of the entry."""

    header: str
    computations: dict[str, Computation]
    entry: str


def read_module(text: str) -> Module:
    """Reads HLO text.

    Raises:
      GShardError: the text is not an HLO module.
    """
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
    """Reads one line; None for a line that only continues a long constant."""
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


def _closing(text: str, start: int) -> int:
    """Index just past the bracket that closes the one at `start`."""
    depth = 0
    for token in _BRACKETS.finditer(text, start):
        if token.group() in "([{":
            depth += 1
        elif token.group() in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    return len(text)


def split_top_level(text: str) -> list[str]:
    """Splits at the commas that lie in no bracket and no string."""
    parts, depth, start = [], 0, 0
    for token in _BRACKETS_AND_COMMAS.finditer(text):
        if token.group() in "([{":
            depth += 1
        elif token.group() in ")]}":
            depth -= 1
        elif token.group() == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]
