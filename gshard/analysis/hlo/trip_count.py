"""Finds how often a `while` runs.

XLA writes the count into `known_trip_count` on CPU and GPU, but not on TPU. There it follows from
the loop itself: an element of the carried tuple that starts at a constant, grows by a constant in
the body and is compared with a constant in the condition. Constants are followed through copies,
fusions, calls and elements that an enclosing loop carries unchanged. A loop of any other form has
no count here: a guess would be silently wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from gshard.analysis.hlo.parser import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME_VALUE = frozenset(
    ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier")
)
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


class Affine(NamedTuple):
    """A carried element plus a constant; a plain constant when `element` is None."""

    element: int | None
    offset: int


@dataclass(frozen=True)
class Frame:
    """A computation as called from one place, so that its parameters can be followed outwards.

    `caller` is the frame that holds `call`, the instruction that runs it; None for the entry.
    `carried` is how a while's body or condition reads an element of the carried tuple. `constant`:
    its value if no run changes it, else unknown. `name`: itself. `resolved`: its value if no run
    changes it, else itself.
    """

    module: Module
    computation: Computation
    caller: Frame | None = None
    call: Instruction | None = None
    carried: str = "constant"

    def enter(self, call: Instruction, computation: str, carried: str = "constant") -> Frame:
        """Returns the frame of a computation that `call`, an instruction of this frame, runs."""
        return Frame(self.module, self.module.computations[computation], self, call, carried)

    def value(self, name: str, index: int | None = None) -> Affine | None:
        """Returns an integer of this frame, or with `index` an element of a tuple of this frame.

        None if it is not affine in one carried element.
        """
        instruction = self.computation.by_name.get(name)
        if instruction is None:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in _SAME_VALUE:
            return self.value(operands[0], index)
        if opcode == "parameter":
            return self._parameter(int(instruction.arguments), index)
        if called := _called(instruction):
            inner = self.enter(instruction, called)
            return inner.value(inner.computation.root.name, index)
        if index is not None:
            if opcode == "tuple":
                return self.value(operands[index])
            return self._unchanged(instruction, index) if opcode == "while" else None
        if opcode == "constant":
            literal = re.fullmatch(r"-?\d+", instruction.arguments.strip())
            return Affine(None, int(literal.group())) if literal else None
        if opcode == "get-tuple-element":
            return self.value(operands[0], int(instruction.attributes["index"]))
        if opcode in ("add", "subtract"):
            sign = 1 if opcode == "add" else -1
            return _combine(self.value(operands[0]), self.value(operands[1]), sign)
        return None

    def _parameter(self, number: int, index: int | None) -> Affine | None:
        if self.caller is None or self.call is None:
            return None
        if self.call.opcode == "while":
            if index is None or self.carried == "name":
                return None if index is None else Affine(index, 0)
            constant = self.caller._unchanged(self.call, index)
            return Affine(index, 0) if constant is None and self.carried == "resolved" else constant
        # Operands and parameters correspond, except those of a conditional.
        if self.call.opcode == "conditional" or number >= len(self.call.operands):
            return None
        return self.caller.value(self.call.operands[number], index)

    def _unchanged(self, loop: Instruction, index: int) -> Affine | None:
        """Returns the initial value of a carried element, if the loop does not change it."""
        body = self.enter(loop, loop.names("body")[0], carried="name")
        if body.value(body.computation.root.name, index) != Affine(index, 0):
            return None
        return self.value(loop.operands[0], index)


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Returns how often the body runs each time `loop`, in `frame`, runs; None if not constant."""
    known = _KNOWN.search(loop.attributes.get("backend_config", ""))
    if known:
        return int(known.group(1))
    compared = _compared(frame.enter(loop, loop.names("condition")[0], carried="resolved"))
    if compared is None:
        return None
    left, direction, right = compared
    if left.element is None:
        left, direction, right = right, _MIRRORED.get(direction, direction), left
    if left.element is None or right.element is not None:
        return None
    start = frame.value(loop.operands[0], left.element)
    body = frame.enter(loop, loop.names("body")[0], carried="resolved")
    after = body.value(body.computation.root.name, left.element)
    if start is None or start.element is not None:
        return None
    if after is None or after.element != left.element or after.offset == 0:
        return None
    return _count(start.offset + left.offset, direction, right.offset, after.offset)


def _compared(frame: Frame) -> tuple[Affine, str, Affine] | None:
    """Returns the two sides and the direction of the comparison that a condition returns."""
    root = frame.computation.root
    while root.opcode in _SAME_VALUE:
        root = frame.computation.by_name[root.operands[0]]
    if root.opcode == "compare":
        left, right = (frame.value(name) for name in root.operands)
        if left is None or right is None:
            return None
        return left, root.attributes.get("direction", ""), right
    called = _called(root)
    return _compared(frame.enter(root, called)) if called else None


def _count(start: int, direction: str, limit: int, step: int) -> int | None:
    """Counts the iterations of `while (i <direction> limit) i += step` from `start`."""
    distance = limit - start if step > 0 else start - limit
    stride = abs(step)
    if direction == ("LT" if step > 0 else "GT"):
        return max(0, -(-distance // stride))
    if direction == ("LE" if step > 0 else "GE"):
        return max(0, distance // stride + 1)
    if direction == "NE" and distance >= 0 and distance % stride == 0:
        return distance // stride
    return None


def _combine(left: Affine | None, right: Affine | None, sign: int) -> Affine | None:
    if left is None or right is None:
        return None
    if right.element is None:
        return left._replace(offset=left.offset + sign * right.offset)
    if left.element is None and sign == 1:
        return right._replace(offset=left.offset + right.offset)
    return None


def _called(instruction: Instruction) -> str | None:
    """Returns the computation whose value a fusion or a call returns."""
    attribute = {"fusion": "calls", "call": "to_apply"}.get(instruction.opcode)
    names = instruction.names(attribute) if attribute else ()
    return names[0] if names else None
