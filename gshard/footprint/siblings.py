"""Kernels that read the same and are made into one: a model of XLA:GPU's `MultiOutputFusion`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gshard.footprint.combine import Kernel, as_one, in_order, waits_for
from gshard.footprint.program import Value

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
    before = _ancestors(kernels)
    head = list(range(len(kernels)))  # of a kernel, the one that it was joined to
    for members in readers.values():
        joined: list[int] = []
        for k in dict.fromkeys(head[m] for m in members):
            other = next((j for j in joined if not _waits(before, j, k)), None)
            if other is None:
                joined.append(k)
                continue
            both = before[other] | before[k]
            pair = 1 << other | 1 << k
            for r in range(len(kernels)):
                if before[r] & pair or r in (other, k):
                    before[r] |= both | (pair if r not in (other, k) else 0)
            head = [other if h == k else h for h in head]
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for k, kernel in enumerate(kernels):
        groups[head[k]].append(kernel)
    return in_order([as_one(part) if len(part) > 1 else part[0] for part in groups.values()])


def _ancestors(kernels: list[Kernel]) -> list[int]:
    """Of every kernel, all that come before it, as bits."""
    found: list[int] = []
    for waits in waits_for(kernels):
        bits = 0
        for b in waits:
            bits |= found[b] | 1 << b
        found.append(bits)
    return found


def _waits(before: Sequence[int], a: int, b: int) -> bool:
    return bool(before[a] >> b & 1 or before[b] >> a & 1)
