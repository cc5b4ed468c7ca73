"""What is broadcast and then written into by several operations: each has a copy of its own."""

from __future__ import annotations

import dataclasses
from collections import Counter

from gshard.analysis.memory.fusion import IN_PLACE
from gshard.analysis.memory.program import FREE, Op, Program


def with_own_zeros(program: Program) -> Program:
    """A program whose broadcasts return a value for every operation that writes into them.

    Equal broadcasts are one for XLA, such as the zeros that gradients of tables start as. What is
    written into is copied for all but one of the writers, right where it is made; XLA:GPU makes all
    of them in one kernel.
    """
    made = {op.outs[0] for op in program.ops if _of_a_constant(op)}
    written = Counter(op.ins[0] for op in program.ops if op.name in IN_PLACE and op.ins[0] in made)
    several = {i: n for i, n in written.items() if n > 1}
    if not several:
        return program
    program = dataclasses.replace(program, values=list(program.values))
    copies = {
        i: [i, *(program.new(program.values[i]) for _ in range(n - 1))] for i, n in several.items()
    }
    left = {i: list(own) for i, own in copies.items()}
    ops = []
    for op in program.ops:
        if op.outs[0] in copies:
            op = dataclasses.replace(op, outs=copies[op.outs[0]])
        elif op.name in IN_PLACE and op.ins[0] in left:
            op = dataclasses.replace(op, ins=[left[op.ins[0]].pop(0), *op.ins[1:]])
        ops.append(op)
    return dataclasses.replace(program, ops=ops)


def _of_a_constant(op: Op) -> bool:
    return op.name == "broadcast_in_dim" and all(i == FREE for i in op.ins)
