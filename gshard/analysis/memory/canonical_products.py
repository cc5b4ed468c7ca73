"""Matrix products and convolutions of XLA:CPU, whose dimensions lie in one order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.analysis.memory.dialect import NEW_CPU
from gshard.analysis.memory.program import FREE, Op, Program


def with_canonical_products(program: Program) -> Program:
    """The program with a copy of each operand whose dimensions lie in another order.

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


def _order(op: Op, side: int, program: Program) -> tuple[int, ...]:
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
