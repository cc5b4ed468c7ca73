"""Kernels, and the collectives among them that a compiler makes into one."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.analysis.memory.program import Op, Value

# In the order in which XLA's passes combine them.
_COMBINED = (("all_gather",), ("reduce_scatter",), ("psum", "psum_invariant"))

_LARGEST = 30 << 20  # bytes of results


@dataclass
class Kernel:
    """What runs as one: its operation, and all that is computed within.

    Attributes:
      op: the operation whose results are written.
      reads: numbers of the buffers that it reads.
      after: numbers of buffers that are written before it, by an optimization barrier.
      writes: numbers of the buffers that it writes.
      place: in the order of the trace.
      elementwise: it may write where an operand of the same size lay.
      late: the compiler made it anew, so that it comes after others that wait for the same.
    """

    op: Op
    reads: list[int]
    writes: list[int]
    place: int
    elementwise: bool
    after: list[int] = field(default_factory=list)
    late: bool = False


def combined(kernels: list[Kernel], values: Sequence[Value], platform: str) -> list[Kernel]:
    """Collectives of one kind and group that do not wait for each other become one.

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
    """Groups in the order of the trace whose results are not too large."""
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
    """A kernel that does what several do, where the last of them is."""
    return dataclasses.replace(
        members[-1],
        reads=list(dict.fromkeys(i for k in members for i in k.reads)),
        writes=[i for k in members for i in k.writes],
        after=list(dict.fromkeys(i for k in members for i in k.after)),
    )


def waits_for(kernels: Sequence[Kernel]) -> list[set[int]]:
    """The kernels that each one waits for."""
    writer = {i: k for k, kernel in enumerate(kernels) for i in kernel.writes}
    return [{writer[i] for i in (*x.reads, *x.after) if i in writer} for x in kernels]


def in_order(kernels: list[Kernel]) -> list[Kernel]:
    """As they were traced, as far as none comes before one that it waits for."""
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
