"""Values of 16 bits that XLA:CPU computes, or reads and writes, in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from gshard.analysis.memory.dialect import NEW_CPU
from gshard.analysis.memory.program import COLLECTIVES, FREE, RESHAPED, Op, Program, Value

_NOT_ROUNDED = {  # by dumps of JAX 0.12: done in bfloat16, or they only move elements
    "abs", "broadcast_in_dim", "clamp", "concatenate", "dynamic_slice", "gather", "max", "min",
    "neg", "pad", "reorder", "rev", "select_n", "sign", "slice", "split", "stack", "transpose",
}  # fmt: skip


def is_narrow(value: Value) -> bool:
    """Whether it is a floating-point number of 16 bits."""
    return value.dtype in (jnp.bfloat16, jnp.float16)


def written_wide(op: Op, value: Value) -> bool:
    """Whether what an operation gives is float32 in memory for all that reads it.

    Collectives always are done in it; up to JAX 0.11 everything is. A loop carries what it is told.
    """
    return is_narrow(value) and not op.bodies and (not NEW_CPU or op.name in COLLECTIVES)


def is_rounded(op: Op, value: Value) -> bool:
    """Whether what an operation gives is rounded from float32 to bfloat16, from JAX 0.12 on.

    That is dear, so that it is done once (`CpuInstructionFusion::IsExpensive`).
    """
    return NEW_CPU and value.dtype == jnp.bfloat16 and op.name not in _NOT_ROUNDED


def with_widened(program: Program, absorbs: Callable[[str], bool]) -> Program:
    """The program in which what lies in memory in 16 bits is read in float32, up to JAX 0.11.

    That are inputs and what loops give; all else is float32 already. A kernel that only computes
    element by element widens as it reads. Everything else reads a copy, which all share. For a
    loop that is a copy of the whole: as its body slices what does not change, and widens it, the
    widening is done before (`FloatNormalization`, `WhileLoopInvariantCodeMotion`).

    Args:
      program: of one device.
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


def _reading_wide(scan: Op) -> Program:
    """The body of a scan that is given in float32 all that it does not carry."""
    (body,), carried = scan.bodies, {a for a, _ in scan.carried}
    values = list(body.values)
    for k, i in enumerate(body.inputs):
        if k not in carried and is_narrow(values[i]):
            values[i] = dataclasses.replace(values[i], dtype=jnp.dtype(jnp.float32))
    return dataclasses.replace(body, values=values)
