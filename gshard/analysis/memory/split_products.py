"""Matrix products that XLA:GPU splits along the dimension that is summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from gshard.analysis.memory.program import FREE, Op, Program, Value

# Of an H100: `SplitkRewriter` of XLA, with its weights for Hopper, in units of its own.
_CORES, _TILE = 132, 128
_COMPUTE, _MEMORY, _SUM_MEMORY, _SUM_LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7
_PARTS = tuple(1 << n for n in range(12))


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
        params = {**op.params, "parts": parts}
        found.ops.append(dataclasses.replace(op, outs=[partial], params=params))
        found.ops.append(Op("sum_parts", [partial], op.outs, {}, op.where))
    return found


def split_k(op: Op, program: Program) -> int:
    """Into how many partial sums XLA:GPU splits a matrix product: as many as it takes for cheapest.

    A product of few tiles leaves cores idle, and the sum of its parts must be written and read.
    """
    if op.name != "dot_general" or FREE in op.ins:
        return 1
    (contracted, _), (batch, _) = op.params["dimension_numbers"]
    left, right = (program.values[i] for i in op.ins[:2])
    if len(left.shape) <= max((*contracted, *batch), default=0):
        return 1
    out = program.values[op.outs[0]]
    b = math.prod(left.shape[d] for d in batch)
    k = math.prod(left.shape[d] for d in contracted)
    if not b * k * out.size:
        return 1
    m, n = left.size // (b * k), right.size // (b * k)
    widths = [max(1, value.dtype.itemsize) for value in (left, right, out)]
    return min(_PARTS, key=lambda parts: _cost(b, m, n, k, widths, parts))


def _cost(b: int, m: int, n: int, k: int, widths: Sequence[int], parts: int) -> float:
    """Of `b` products of (m, k) and (k, n), `EstimateGemmCostAfterSplitK` of XLA."""
    tile = min(m, _TILE) * min(n, _TILE)
    tiles = b * parts * -(-m // _TILE) * -(-n // _TILE)
    waves = max(1.0, tiles * tile / (_CORES * _TILE * _TILE))
    compute = 2.0 * tile * -(-k // parts) * waves * _COMPUTE
    results = b * m * n
    written = results * parts * (max(4, widths[2]) if parts > 1 else widths[2])
    memory = (b * k * (m * widths[0] + n * widths[1]) + written) * _MEMORY
    product = max(compute, memory)
    if parts == 1:
        return product
    return product + _SUM_LAUNCH + (written + results * widths[2]) * _SUM_MEMORY
