"""Results of operations that are their operand's buffer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from gshard.analysis.memory.program import FREE, RESHAPED, Op, Program

_PRODUCT = ("dot_general", "sum_parts")


def views(program: Program, platform: str) -> dict[int, int]:
    """Results that are their operand's buffer under another shape."""
    view: dict[int, int] = {}
    users: dict[int, list[Op]] = defaultdict(list)
    made = {out: op for op in program.ops for out in op.outs}
    for op in program.ops:
        for i in op.ins:
            users[i].append(op)
    for op in program.ops:
        if op.name in (*RESHAPED, "optimization_barrier") or (
            op.name == "rev" and _read_in_reverse(op, users, program, platform)
        ):
            view.update({o: i for i, o in zip(op.ins, op.outs, strict=False) if i != FREE})
        elif op.name == "reorder" and _as_it_lies(op, made, users, program, platform):
            view[op.outs[0]] = op.ins[0]
        elif op.name == "transpose" and op.ins[0] != FREE:
            source = made.get(op.ins[0])
            # A product is written the other way round for it.
            if source is not None and source.name in _PRODUCT and len(users[op.ins[0]]) == 1:
                view[op.outs[0]] = op.ins[0]
        elif op.name == "reshard" and op.ins[0] != FREE:
            a, b = program.values[op.ins[0]], program.values[op.outs[0]]
            if a.bytes == b.bytes:
                view[op.outs[0]] = op.ins[0]
    return view


def _read_in_reverse(
    op: Op, users: Mapping[int, list[Op]], program: Program, platform: str
) -> bool:
    """Whether convolutions reverse a kernel as they read it, as cuDNN's do.

    Those of XLA:CPU only where the kernel has more positions than what it goes over, for which it
    then is taken (`SwapConvOperands`).
    """

    def positions(conv: Op, side: int) -> int:
        numbers = conv.params["dimension_numbers"]
        shape = program.values[conv.ins[side]].shape
        return math.prod(shape[d] for d in (numbers.lhs_spec, numbers.rhs_spec)[side][2:])

    return platform != "cpu" or all(
        conv.name == "conv_general_dilated" and positions(conv, 0) < positions(conv, 1)
        for conv in users[op.outs[0]]
    )


def _as_it_lies(
    op: Op, made: Mapping[int, Op], users: Mapping[int, list[Op]], program: Program, platform: str
) -> bool:
    """Whether a matrix product reads, or writes, a matrix in either order of its dimensions.

    On CPU, a convolution writes in any.
    """
    source = made.get(op.ins[0])
    if source is not None and source.name == "conv_general_dilated" and platform == "cpu":
        return len(users[op.ins[0]]) == 1
    if len(program.values[op.ins[0]].shape) != 2 or op.outs[0] in program.outputs:
        return False
    if source is not None and source.name in _PRODUCT:
        return len(users[op.ins[0]]) == 1
    return bool(users[op.outs[0]]) and all(u.name == "dot_general" for u in users[op.outs[0]])
