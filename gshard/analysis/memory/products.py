"""Operands of matrix products that XLA:CPU copies into another order."""

from __future__ import annotations

import dataclasses

from gshard.analysis.memory.program import FREE, Op, TracedProgram


def with_canonical_products(program: TracedProgram) -> TracedProgram:
    """Returns the program with a copy of each operand whose dimensions must be reordered.

    `DotDecomposer` puts the batch dimensions first. In the left operand, those that stay and then
    those that are summed over follow; in the right operand, the other way round. One dimension that
    stays and one that is summed over need no copy in either order.
    """
    found = dataclasses.replace(program, ops=[], values=list(program.values))
    copies: dict[tuple[int, tuple[int, ...]], int] = {}

    def copy(op: Op, side: int) -> int:
        i, order = op.ins[side], _order(op, side, program)
        if not order:
            return i
        if (i, order) not in copies:
            copies[i, order] = found.new(program.values[i])
            found.ops.append(Op("reorder", [i], [copies[i, order]], {}, op.where))
        return copies[i, order]

    for op in program.ops:
        if op.name == "dot_general":
            op = dataclasses.replace(op, ins=[copy(op, 0), copy(op, 1)])
        found.ops.append(op)
    return found


def _order(op: Op, side: int, program: TracedProgram) -> tuple[int, ...]:
    """The order in which an operand is copied, without dimensions of size 1; () for no copy."""
    if op.ins[side] == FREE:
        return ()
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
