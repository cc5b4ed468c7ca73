"""Kernels, and how compilers combine collectives and, on GPU, kernels that read the same value."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.analysis.memory.program import Op, Value

# In the order in which XLA's passes combine them.
_COMBINED = (("all_gather",), ("reduce_scatter",), ("psum", "psum_invariant"))

_LARGEST = 30 << 20  # bytes of results


@dataclass
class Kernel:
    """One kernel: an operation and everything that is computed inside it.

    Attributes:
      op: the operation whose results are written.
      reads: numbers of the buffers that it reads.
      after: numbers of buffers that are written before it, by an optimization barrier.
      writes: numbers of the buffers that it writes.
      place: its position in the order of the trace.
      elementwise: whether it may write into the memory of an operand of the same size.
      late: whether the compiler created it again, so that it runs after other kernels that wait
        for the same operands.
    """

    op: Op
    reads: list[int]
    writes: list[int]
    place: int
    elementwise: bool
    after: list[int] = field(default_factory=list)
    late: bool = False


def combined(kernels: list[Kernel], values: Sequence[Value], platform: str) -> list[Kernel]:
    """Combines collectives of one kind and group that do not wait for each other.

    XLA:CPU combines sums alone. All stop at 30 MiB of results, so that for eight devices gradients
    of eight times as much may wait, whole, for one reduce-scatter.
    """
    for names in _COMBINED[-1:] if platform == "cpu" else _COMBINED:
        kernels = _of_one_kind(kernels, values, names)
    return kernels


def _of_one_kind(
    kernels: list[Kernel], values: Sequence[Value], names: Sequence[str]
) -> list[Kernel]:
    before = waits_for(kernels)
    depth: list[int] = []
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for k, kernel in enumerate(kernels):
        depth.append(max((depth[b] + (kernels[b].op.name in names) for b in before[k]), default=0))
        if kernel.op.name in names:
            params = kernel.op.params
            axes = str((params.get("axes", params.get("axis_name")), params["axis_index_groups"]))
            groups[depth[k], axes].append(k)
    merged = [
        part
        for members in groups.values()
        for part in _parts([kernels[k] for k in members], values)
        if len(part) > 1
    ]
    if not merged:
        return kernels
    gone = {kernel.place for part in merged for kernel in part}
    made = [as_one(part) for part in merged]
    return in_order([kernel for kernel in kernels if kernel.place not in gone] + made)


def _parts(members: list[Kernel], values: Sequence[Value]) -> list[list[Kernel]]:
    """Splits kernels, in trace order, into groups whose results are not too large."""
    found: list[list[Kernel]] = [[]]
    held = 0
    for kernel in members:
        size = sum(values[i].bytes for i in kernel.writes)
        if held + size > _LARGEST:
            found.append([])
            held = 0
        found[-1].append(kernel)
        held += size
    return found


def as_one(members: list[Kernel]) -> Kernel:
    """Returns one kernel that does the work of several, at the position of the last of them."""
    return dataclasses.replace(
        members[-1],
        reads=list(dict.fromkeys(i for k in members for i in k.reads)),
        writes=[i for k in members for i in k.writes],
        after=list(dict.fromkeys(i for k in members for i in k.after)),
    )


def waits_for(kernels: Sequence[Kernel]) -> list[set[int]]:
    """Returns, for each kernel, the kernels that it waits for."""
    writer = {i: k for k, kernel in enumerate(kernels) for i in kernel.writes}
    return [{writer[i] for i in (*x.reads, *x.after) if i in writer} for x in kernels]


def in_order(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels in trace order, moved only to come after the kernels they wait for."""
    before = waits_for(kernels)
    after: list[list[int]] = [[] for _ in kernels]
    for k, waits in enumerate(before):
        for b in waits:
            after[b].append(k)
    left = [len(waits) for waits in before]
    heap = [(kernels[k].place, k) for k, n in enumerate(left) if not n]
    heapq.heapify(heap)
    found = []
    while heap:
        _, k = heapq.heappop(heap)
        found.append(kernels[k])
        for a in after[k]:
            left[a] -= 1
            if not left[a]:
                heapq.heappush(heap, (kernels[a].place, a))
    return found


_MOVED = {  # reads what lies elsewhere than what it writes, so that one loop does not do for both
    "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "reorder", "slice",
    "split", "sum_parts", "transpose",
}  # fmt: skip


def siblings_joined(
    kernels: list[Kernel], values: Sequence[Value], fusible: Sequence[bool]
) -> list[Kernel]:
    """Combines element-wise kernels of one shape that read the same value of that size.

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
