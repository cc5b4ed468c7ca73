"""Models XLA:CPU: what it computes again for each reader, widens to float32, and copies."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from gshard.analysis.memory.program import (
    COLLECTIVES,
    FREE,
    NEW_CPU,
    RESHAPED,
    Op,
    TracedProgram,
    Value,
    views,
)

# How a value is read: computed within the kernel, or from memory: as it lies, or in another shape.
_Reading = tuple[int, ...] | str
_WITHIN, _AS_IT_LIES = "within", "as it lies"
_FROM_NOTHING = ("broadcast_in_dim", "iota")
_TWO_OF_ITS_SIZE = ("one_minus_square", "integer_pow")  # as (1 + x) * (1 - x), as x * (x * x)


def with_repeated(
    program: TracedProgram, cheap: Callable[[Op], bool], absorbs: Callable[[str], bool]
) -> TracedProgram:
    """Returns the program with a separate copy of each cheap operation for each way it is read.

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
    """Finds how every value is read, and then builds the new program."""

    def __init__(
        self, program: TracedProgram, cheap: Callable[[Op], bool], absorbs: Callable[[str], bool]
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
        """Returns the value that value `i` is a reshaped version of."""
        while i in self.made and self.made[i].name in RESHAPED and self.made[i].ins[0] != FREE:
            i = self.made[i].ins[0]
        return i

    def lying(self, i: int) -> _Reading:
        """Returns the reading of a value from memory in its own shape."""
        return _AS_IT_LIES if i == FREE else self._in_shape(i, self.program.values[i].shape)

    def _in_shape(self, i: int, shape: tuple[int, ...]) -> _Reading:
        return _AS_IT_LIES if shape == self.program.values[self.root(i)].shape else shape

    def reading(self, op: Op, place: int) -> _Reading:
        """Returns how an operation reads an operand."""
        i = op.ins[place]
        if op.name.startswith(("reduce_", "arg")) and self.absorbs(op.name):  # no collective
            return _AS_IT_LIES
        if i == FREE or op.outs[0] in self.view:
            return self.lying(i)
        if op.name == "dot_general":
            return self._in_shape(i, _merged(op, place, self.program.values[i].shape))
        return _WITHIN if self.absorbs(op.name) else self.lying(i)

    def repeated(self, op: Op) -> list[_Reading]:
        """Returns the readings for which a result is computed separately; none if it runs once."""
        if len(op.outs) > 1 or op.outs[0] in self.view or not self.cheap(op):
            return []
        found = list(self.readings[op.outs[0]])
        once = _AS_IT_LIES in found and not self._of_one(op)
        return [] if once or len(found) < 2 else found

    def _of_one(self, op: Op) -> bool:
        """Whether a result is computed from one array no larger than it, or from no more bytes."""
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

    def result(self) -> TracedProgram:
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
        """Returns the value that is read in place of value `i`."""
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
    """Returns the shape of a product's operand after dimensions of one kind are merged."""
    summed, batch = (dims[side] for dims in op.params["dimension_numbers"])
    stay = [d for d in range(len(shape)) if d not in (*summed, *batch)]
    kinds = sorted(dims for dims in (stay, sorted(summed)) if dims)
    return (*(shape[d] for d in batch), *(math.prod(shape[d] for d in dims) for dims in kinds))


_NOT_ROUNDED = {  # by dumps of JAX 0.12: done in bfloat16, or they only move elements
    "abs", "broadcast_in_dim", "clamp", "concatenate", "dynamic_slice", "gather", "max", "min",
    "neg", "pad", "reorder", "rev", "select_n", "sign", "slice", "split", "stack", "transpose",
}  # fmt: skip


def is_narrow(value: Value) -> bool:
    """Whether a value has a 16-bit floating-point dtype."""
    return value.dtype in (jnp.bfloat16, jnp.float16)


def written_wide(op: Op, value: Value) -> bool:
    """Whether the result of an operation is float32 in memory for all its readers.

    Collectives always run in float32; up to JAX 0.11 every operation does. A loop carries values
    in the dtypes that it is given.
    """
    return is_narrow(value) and not op.bodies and (not NEW_CPU or op.name in COLLECTIVES)


def is_rounded(op: Op, value: Value) -> bool:
    """Whether the result of an operation is rounded from float32 to bfloat16, from JAX 0.12 on.

    Rounding is expensive, so it is done once (`CpuInstructionFusion::IsExpensive`).
    """
    return NEW_CPU and value.dtype == jnp.bfloat16 and op.name not in _NOT_ROUNDED


def with_widened(program: TracedProgram, absorbs: Callable[[str], bool]) -> TracedProgram:
    """Returns the program with 16-bit values in memory read as float32, as up to JAX 0.11.

    These values are inputs and the results of loops; everything else is float32 already. An
    element-wise kernel widens values as it reads them. All other kernels share one widened copy.
    For a loop, the full array is copied: its body slices and widens an array that does not change,
    so the widening moves out of the loop (`FloatNormalization`, `WhileLoopInvariantCodeMotion`).

    Args:
      program: the program of one device.
      absorbs: whether an operation of this name widens as it reads.
    """
    found = dataclasses.replace(program, ops=[], values=list(program.values))
    in_memory = {i for i in program.inputs if is_narrow(program.values[i])}
    copies: dict[int, int] = {}

    def copy(i: int) -> int:
        if i not in in_memory:
            return i
        if i not in copies:
            value = found.values[i]
            copies[i] = found.new(dataclasses.replace(value, dtype=jnp.dtype(jnp.float32)))
            found.ops.append(Op("convert_element_type", [i], [copies[i]], {}, ""))
        return copies[i]

    for op in program.ops:
        narrow = {out for out in op.outs if is_narrow(program.values[out])}
        if op.name == "scan":
            carried = {a for a, _ in op.carried}
            ins = [i if k in carried else copy(i) for k, i in enumerate(op.ins)]
            op = dataclasses.replace(op, ins=ins, bodies=[_reading_wide(op)])
        elif not (op.bodies or op.name in RESHAPED or absorbs(op.name)):
            op = dataclasses.replace(op, ins=[i if i == FREE else copy(i) for i in op.ins])
        if op.bodies or op.name in RESHAPED and in_memory.intersection(op.ins):
            in_memory |= narrow
        found.ops.append(op)
    return found


def _reading_wide(scan: Op) -> TracedProgram:
    """Returns the body of a scan that receives everything it does not carry as float32."""
    (body,), carried = scan.bodies, {a for a, _ in scan.carried}
    values = list(body.values)
    for k, i in enumerate(body.inputs):
        if k not in carried and is_narrow(values[i]):
            values[i] = dataclasses.replace(values[i], dtype=jnp.dtype(jnp.float32))
    return dataclasses.replace(body, values=values)


def with_canonical_products(program: TracedProgram) -> TracedProgram:
    """Returns the program with a copy of each operand whose dimensions must be reordered.

    `DotDecomposer` has those of a batch first, then those that stay and those that are summed over,
    of the right operand these first, and merges the dimensions of each kind. One dimension that
    stays and one that is summed over may change places: that, the product itself can do.
    `ConvCanonicalization` has rows, positions and features of what a convolution reads and writes,
    and positions, features in and features out of its kernel. It leaves out the bodies of loops.
    The result is written as it is wanted; from JAX 0.12 on it is copied, too.
    """
    found = dataclasses.replace(program, ops=[], values=list(program.values))
    copies: dict[tuple[int, tuple[int, ...]], int] = {}

    def copy(op: Op, side: int) -> int:
        i, order = op.ins[side], _order(op, side, program)
        if i == FREE or not order:
            return i
        if (i, order) not in copies:
            copies[i, order] = found.new(program.values[i])
            found.ops.append(Op("reorder", [i], [copies[i, order]], {}, op.where))
        return copies[i, order]

    for op in program.ops:
        if op.name in ("dot_general", "conv_general_dilated"):
            op = dataclasses.replace(op, ins=[copy(op, 0), copy(op, 1)])
        if op.name == "conv_general_dilated" and NEW_CPU and not program.is_body:
            if _order_of_positions(op.params["dimension_numbers"].out_spec):
                result = found.new(program.values[op.outs[0]])
                found.ops.append(dataclasses.replace(op, outs=[result]))
                op = Op("transpose", [result], op.outs, {}, op.where)
        found.ops.append(op)
    return found


def _order(op: Op, side: int, program: TracedProgram) -> tuple[int, ...]:
    """The order that an operand is copied into, but for dimensions of size 1; empty for none."""
    if op.ins[side] == FREE:
        return ()
    if op.name == "conv_general_dilated":
        return () if program.is_body else _order_of_convolution(op, side)
    shape = program.values[op.ins[side]].shape
    summed, batch = (
        [d for d in dims[side] if shape[d] > 1] for dims in op.params["dimension_numbers"]
    )
    stay = [d for d, size in enumerate(shape) if size > 1 and d not in (*summed, *batch)]
    order = (*batch, *stay, *summed) if side == 0 else (*batch, *summed, *stay)
    swapped = (*batch, *summed, *stay) if side == 0 else (*batch, *stay, *summed)
    if order == tuple(sorted(order)):
        return ()
    if swapped == tuple(sorted(order)) and len(stay) == len(summed) == 1:
        return ()
    return order


def _order_of_convolution(op: Op, side: int) -> tuple[int, ...]:
    numbers = op.params["dimension_numbers"]
    if side == 0:
        return _order_of_positions(numbers.lhs_spec)
    made, read, *positions = numbers.rhs_spec
    return _unless_in_order((*positions, read, made))


def _order_of_positions(spec: Sequence[int]) -> tuple[int, ...]:
    rows, features, *positions = spec
    return _unless_in_order((rows, *positions, features))


def _unless_in_order(order: tuple[int, ...]) -> tuple[int, ...]:
    return order if order != tuple(sorted(order)) else ()
