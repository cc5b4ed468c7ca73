"""Kernels that read the same and are made into one: a model of XLA:GPU's `MultiOutputFusion`."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from gshard.analysis.memory.combine import Kernel, as_one, in_order, waits_for
from gshard.analysis.memory.program import FREE, Op, TracedProgram, Value

_MOVED = {  # reads what lies elsewhere than what it writes, so that one loop does not do for both
    "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "reorder", "slice",
    "split", "sum_parts", "transpose",
}  # fmt: skip


def siblings_joined(
    kernels: list[Kernel], values: Sequence[Value], fusible: Sequence[bool]
) -> list[Kernel]:
    """Element-wise kernels of one shape that read one value of that size become one kernel.

    It has several results. What is recomputed for the gradient of a weight is so computed beside
    the gradients that need the same operands, which then are no longer needed.

    Args:
      kernels: in an order in which each comes after those that it waits for.
      values: of the program.
      fusible: of every kernel, whether it only computes element by element.
    """
    readers: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for k, kernel in enumerate(kernels):
        if fusible[k] and kernel.op.name not in _MOVED and len(kernel.writes) == 1:
            value = values[kernel.writes[0]]
            for i in kernel.reads:
                if values[i].size == value.size > 1:
                    readers[i, value.shape].append(k)
    questions = [members for members in readers.values() if len(members) > 1]
    last = {k: at for at, members in enumerate(questions) for k in members}
    # Only of those is asked what they wait for: all else would be noted in vain.
    bit = {k: 1 << n for n, k in enumerate(last)}
    before = _ancestors(kernels, bit)
    head = list(range(len(kernels)))  # of a kernel, the one that it was joined to
    left = list(last)
    for at, members in enumerate(questions):
        joined: list[int] = []
        for k in dict.fromkeys(_root(head, m) for m in members):
            other = next((j for j in joined if not _wait(before, bit, j, k)), None)
            if other is None:
                joined.append(k)
                continue
            both, pair = before[other] | before[k], bit[other] | bit[k]
            head[k], last[other] = other, max(last[other], last[k])
            left = [r for r in left if last[r] >= at and r != k]
            for r in left:
                if before[r] & pair:
                    before[r] |= both | pair
            before[other] = both
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for k, kernel in enumerate(kernels):
        groups[_root(head, k)].append(kernel)
    return in_order([as_one(part) if len(part) > 1 else part[0] for part in groups.values()])


def _root(head: Sequence[int], k: int) -> int:
    while head[k] != k:
        k = head[k]
    return k


def _ancestors(kernels: list[Kernel], bit: Mapping[int, int]) -> list[int]:
    """Of every kernel, those of some that come before it, each as its bit."""
    found: list[int] = []
    for waits in waits_for(kernels):
        bits = 0
        for b in waits:
            bits |= found[b] | bit.get(b, 0)
        found.append(bits)
    return found


def _wait(before: Sequence[int], bit: Mapping[int, int], a: int, b: int) -> bool:
    return bool(before[a] & bit[b] or before[b] & bit[a])


# Of an H100: `SplitkRewriter` of XLA, with its weights for Hopper, in units of its own.
_CORES, _TILE = 132, 128
_COMPUTE, _MEMORY, _SUM_MEMORY, _SUM_LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7
_PARTS = tuple(1 << n for n in range(12))


def with_split_products(program: TracedProgram) -> TracedProgram:
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


def split_k(op: Op, program: TracedProgram) -> int:
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
