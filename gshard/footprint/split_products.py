"""Matrix products that XLA:GPU splits along the dimension that is summed."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from gshard.footprint.program import FREE, Op, Program, Value

# Of an H100 or B200, as XLA fills them: one tile of a matrix product per core.
_CORES, _TILE, _SHORTEST = 132, 64 * 128, 128


def with_split_products(program: Program) -> Program:
    """The program with split products as two operations: partial sums, and `sum_parts` of them.

    The partial sums are a buffer, in float32 where the product has 16 bits. Their sum is computed
    where it is read, so that those of products that are added up are live together.
    """
    found = dataclasses.replace(program, ops=[], values=list(program.values))
    for op in program.ops:
        parts = split_k(op, program)
        if parts == 1:
            found.ops.append(op)
            continue
        value = program.values[op.outs[0]]
        dtype = jnp.promote_types(value.dtype, jnp.float32)
        partial = found.new(Value((parts, *value.shape), dtype, (1, *value.factors)))
        found.ops.append(dataclasses.replace(op, outs=[partial]))
        found.ops.append(Op("sum_parts", [partial], op.outs, {}, op.where))
    return found


def split_k(op: Op, program: Program) -> int:
    """Into how many partial sums XLA:GPU splits a matrix product that has too few tiles.

    Measured on programs for an H100: the largest power of two by which tiles still fit its cores
    and that leaves a sum of 128 products or more; sums of less than 1024 are not split.
    """
    if op.name != "dot_general" or FREE in op.ins:
        return 1
    (left, _), (batch, _) = op.params["dimension_numbers"]
    shape = program.values[op.ins[0]].shape
    if batch or len(shape) <= max(left, default=0):
        return 1
    length = math.prod(shape[d] for d in left)
    tiles = max(1, program.values[op.outs[0]].size // _TILE)
    if length < 1024:
        return 1
    most = min(_CORES // tiles, length // _SHORTEST)
    return 1 << max(0, most.bit_length() - 1)
