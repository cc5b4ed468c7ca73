"""What XLA:CPU keeps in memory for some of its readers and computes anew for the others."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

from gshard.analysis.memory.program import FREE, RESHAPED, Op, Program
from gshard.analysis.memory.views import views

# How a value is read: computed within the kernel, or from memory: as it lies, or in another shape.
_Reading = tuple[int, ...] | str
_WITHIN, _AS_IT_LIES = "within", "as it lies"
_FROM_NOTHING = ("broadcast_in_dim", "iota")
_TWO_OF_ITS_SIZE = ("one_minus_square", "integer_pow")  # as (1 + x) * (1 - x), as x * (x * x)


def with_repeated(
    program: Program, cheap: Callable[[Op], bool], absorbs: Callable[[str], bool]
) -> Program:
    """The program in which what is cheap is an operation of its own for each way it is read.

    `CpuInstructionFusion` goes from readers to what they read. A change of shape, such as the one
    to the matrices that `DotDecomposer` makes of the operands of a product, is a reader like any
    that computes: what is cheap is computed once more in its buffer. So it is in every kernel that
    computes, which then reads what the value is made from, even if the value itself has to lie in
    memory for another, such as a loop (`InstructionFusion::ComputeGloballyUnfusible`). Then alone
    it must be made from one array of its size at most. A reduction reads from memory what others
    read too (`LibraryRewriter`), as it lies whatever changes its shape between. So does an
    optimization barrier, which still is there, in the shape that it is handed.

    Args:
      program: of one device, in canonical order.
      cheap: whether an operation may be computed where it is read, more than once.
      absorbs: whether a kernel of an operation of this name computes its operands itself.
    """
    return _Repeating(program, cheap, absorbs).result()


class _Repeating:
    """Finds how every value is read, and then writes the program anew."""

    def __init__(
        self, program: Program, cheap: Callable[[Op], bool], absorbs: Callable[[str], bool]
    ):
        self.program, self.cheap, self.absorbs = program, cheap, absorbs
        self.made = {out: op for op in program.ops for out in op.outs}
        self.view = views(program, "cpu")
        self.readings: dict[int, dict[_Reading, None]] = defaultdict(dict)  # of a root, in order
        self.barred: dict[int, set[_Reading]] = defaultdict(set)  # of a root, by barriers
        for op in program.ops:
            if op.name not in RESHAPED:
                for place, i in enumerate(op.ins):
                    root, reading = self.root(i), self.reading(op, place)
                    self.readings[root][reading] = None
                    if op.name == "optimization_barrier":
                        self.barred[root].add(reading)
        for i in program.outputs:
            self.readings[self.root(i)][self.lying(i)] = None
        self.found = dataclasses.replace(program, ops=[], values=list(program.values))
        self.copies: dict[tuple[int, _Reading], int] = {}

    def root(self, i: int) -> int:
        """The value that another one is in another shape."""
        while i in self.made and self.made[i].name in RESHAPED and self.made[i].ins[0] != FREE:
            i = self.made[i].ins[0]
        return i

    def lying(self, i: int) -> _Reading:
        """How it is read from memory, in the shape that it has."""
        return _AS_IT_LIES if i == FREE else self._in_shape(i, self.program.values[i].shape)

    def _in_shape(self, i: int, shape: tuple[int, ...]) -> _Reading:
        return _AS_IT_LIES if shape == self.program.values[self.root(i)].shape else shape

    def reading(self, op: Op, place: int) -> _Reading:
        """How an operation reads an operand."""
        i = op.ins[place]
        if op.name.startswith(("reduce_", "arg")) and self.absorbs(op.name):  # no collective
            return _AS_IT_LIES
        if i == FREE or op.outs[0] in self.view:
            return self.lying(i)
        if op.name == "dot_general":
            return self._in_shape(i, _merged(op, place, self.program.values[i].shape))
        return _WITHIN if self.absorbs(op.name) else self.lying(i)

    def repeated(self, op: Op) -> list[_Reading]:
        """The ways to read a result for which it is computed separately; none for once."""
        if len(op.outs) > 1 or op.outs[0] in self.view or not self.cheap(op):
            return []
        found = list(self.readings[op.outs[0]])
        once = _AS_IT_LIES in found and not self._of_one(op)
        return [] if once or len(found) < 2 else found

    def _of_one(self, op: Op) -> bool:
        """Whether it is made from one array of its size at most, or from no more bytes."""
        if op.name in _TWO_OF_ITS_SIZE and op.params.get("y") != 2:
            return False
        values, out = self.program.values, self.program.values[op.outs[0]]
        own = {i: op.ins.count(i) for i in op.ins if i != FREE}
        made = {i: self.made[i].name if i in self.made else "" for i in own}
        large = [
            n
            for i, n in own.items()
            if made[i] not in _FROM_NOTHING and _rank(values[i].shape) >= _rank(out.shape)
        ]
        return sum(large) <= 1 or sum(values[i].size for i in own) <= out.size

    def result(self) -> Program:
        separate: set[int] = set()  # what does not lie in memory as it was
        for op in self.program.ops:
            if op.name in RESHAPED:
                if self.root(op.outs[0]) not in separate:
                    self.found.ops.append(op)
                continue
            readings = self.repeated(op)
            ins = [self.read(i, self.reading(op, place)) for place, i in enumerate(op.ins)]
            barred = {reading for out in op.outs for reading in self.barred[out]}
            op = dataclasses.replace(op, ins=ins, held=bool(barred))
            for reading in readings:
                if reading != _AS_IT_LIES:
                    made = self.found.new(self.program.values[op.outs[0]])
                    self.copies[op.outs[0], reading] = made
                    held = reading in barred
                    self.found.ops.append(dataclasses.replace(op, outs=[made], held=held))
            if not readings:
                self.found.ops.append(op)
            elif _AS_IT_LIES in readings:
                self.found.ops.append(dataclasses.replace(op, held=True))
            else:
                separate.update(op.outs)
        self.found.outputs = [self.read(i, self.lying(i)) for i in self.program.outputs]
        return self.found

    def read(self, i: int, reading: _Reading) -> int:
        """The value that is read in place of another one."""
        root = self.root(i)
        if (root, reading) not in self.copies:
            return i
        copy = self.copies[root, reading]
        if self.program.values[i].shape == self.program.values[root].shape:
            return copy
        again = self.found.new(self.program.values[i])
        self.found.ops.append(Op("reshape", [copy], [again], {}, ""))
        return again


def _rank(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def _merged(op: Op, side: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the operand of a product whose dimensions of one kind are merged into one."""
    summed, batch = (dims[side] for dims in op.params["dimension_numbers"])
    stay = [d for d in range(len(shape)) if d not in (*summed, *batch)]
    kinds = sorted(dims for dims in (stay, sorted(summed)) if dims)
    return (*(shape[d] for d in batch), *(math.prod(shape[d] for d in dims) for dims in kinds))
