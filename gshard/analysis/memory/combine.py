"""Collectives that compilers combine: all of their operands are live before the first is sent."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gshard.analysis.memory.program import Kernel, Value

# In the order in which XLA's passes combine them.
_COMBINED = (("all_gather",), ("reduce_scatter",), ("psum", "psum_invariant"))
_LARGEST = 30 << 20  # bytes of results


def combined(kernels: list[Kernel], values: Sequence[Value]) -> list[Kernel]:
    """Combines collectives of one kind and group that do not wait for each other, as XLA:GPU does.

    It stops at 30 MiB of results. With eight devices, these are 240 MiB of gradients that wait for
    one reduce-scatter.
    """
    for names in _COMBINED:
        kernels = _of_one_kind(kernels, values, names)
    return kernels


def _of_one_kind(
    kernels: list[Kernel], values: Sequence[Value], names: Sequence[str]
) -> list[Kernel]:
    depth: list[int] = []  # the largest number of such collectives one after the other
    groups: dict[tuple[Any, ...], list[list[int]]] = defaultdict(list)
    size = 0
    for k, (kernel, waits) in enumerate(zip(kernels, graph_of(kernels)[0], strict=True)):
        depth.append(max((depth[b] + (kernels[b].op.name in names) for b in waits), default=0))
        if kernel.op.name in names:
            params = kernel.op.params
            axes = str((params.get("axes", params.get("axis_name")), params["axis_index_groups"]))
            parts = groups[depth[k], axes]
            own = sum(values[i].bytes for i in kernel.writes)
            size = own + sum(
                values[i].bytes for j in (parts or [[]])[-1] for i in kernels[j].writes
            )
            if not parts or size > _LARGEST:
                parts.append([])
            parts[-1].append(k)
    head = {k: part[-1] for parts in groups.values() for part in parts for k in part}
    members: dict[int, list[Kernel]] = defaultdict(list)
    for k, kernel in enumerate(kernels):
        members[head.get(k, k)].append(kernel)
    return _in_order([_as_one(members[k]) for k in sorted(members)])


def _as_one(members: Sequence[Kernel]) -> Kernel:
    """Returns one kernel that does the work of several."""
    return dataclasses.replace(
        members[-1],
        reads=list(dict.fromkeys(i for k in members for i in k.reads)),
        writes=[i for k in members for i in k.writes],
        after=list(dict.fromkeys(i for k in members for i in k.after)),
    )


def graph_of(kernels: Sequence[Kernel]) -> tuple[list[set[int]], list[list[int]]]:
    """Returns, for each kernel, the kernels it waits for and the kernels that wait for it."""
    writer = {i: k for k, kernel in enumerate(kernels) for i in kernel.writes}
    before = [{writer[i] for i in (*x.reads, *x.after) if i in writer} for x in kernels]
    after: list[list[int]] = [[] for _ in kernels]
    for k, waits in enumerate(before):
        for b in waits:
            after[b].append(k)
    return before, after


def _in_order(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels as they are, moved only to come after the kernels they wait for."""
    before, after = graph_of(kernels)
    left = [len(waits) for waits in before]
    ready = [k for k, n in enumerate(left) if not n]
    found = []
    while ready:
        k = heapq.heappop(ready)
        found.append(kernels[k])
        for a in after[k]:
            left[a] -= 1
            if not left[a]:
                heapq.heappush(ready, a)
    return found
