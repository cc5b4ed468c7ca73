"""Kernels that read the same and are made into one: a model of XLA:GPU's `MultiOutputFusion`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gshard.analysis.memory.combine import Kernel, as_one, in_order, waits_for
from gshard.analysis.memory.program import Value

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
