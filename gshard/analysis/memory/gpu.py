"""Models the order in which XLA:GPU runs kernels so that computation overlaps with collectives.

This is a model of its `LatencyHidingScheduler`, which takes the order with the least memory and
builds a new one from the end to the beginning, without regard to memory. (If more than half of the
device's memory is in use, the scheduler also considers memory; that is not modelled.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from gshard.analysis.memory.combine import Kernel
from gshard.analysis.memory.fusion import Fused
from gshard.analysis.memory.program import COLLECTIVES, Op, TracedProgram, flops_of_op

_EDGE = 1.0  # microseconds from a kernel to one that waits for it


def latency_hidden(whole: Fused, order: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels in the order in which XLA:GPU runs them.

    A collective becomes two kernels: its start, which writes the results, and a `done` that reads
    its operands and results, so that these stay live until then.

    Args:
      whole: the fused program.
      order: the order of its kernels where nothing else decides.
    """
    if not any(kernel.op.name in COLLECTIVES for kernel in order):
        return list(order)
    return _Scheduler(whole, order).scheduled()


class _Scheduler:
    """Schedules nodes numbered in the given order; `start` is indexed by a `done`'s number."""

    def __init__(self, whole: Fused, order: Sequence[Kernel]):
        self.program = whole.program
        self.nodes: list[Kernel] = []
        self.start: dict[int, int] = {}
        for kernel in order:
            self.nodes.append(kernel)
            if kernel.op.name in COLLECTIVES:
                self.start[len(self.nodes)] = len(self.nodes) - 1
                op = Op("done", [], [], {}, kernel.op.where)
                held = [*kernel.reads, *kernel.writes]
                self.nodes.append(Kernel(op, held, [], kernel.place, False))
        self.starts = set(self.start.values())
        self.hidden = {s: latency(self.nodes[s], self.program) for s in self.starts}
        self.times = [  # of a start or a done itself: `kLowCost`
            1.0 if k in self.starts or k in self.start else time_of(kernel, self.program)
            for k, kernel in enumerate(self.nodes)
        ]
        self.readers: dict[tuple[int, int], list[int]] = defaultdict(list)  # by value and view
        for k, kernel in enumerate(self.nodes):
            for i in () if k in self.start else kernel.reads:
                self.readers[i, self._view(k, i)].append(k)
        self.before = self._graph()
        self.after: list[list[int]] = [[] for _ in self.nodes]
        for k, waits in enumerate(self.before):
            for b in waits:
                self.after[b].append(k)
        self.depth: list[float] = []  # microseconds of collectives that a node comes after
        for k, waits in enumerate(self.before):
            depth = max((self.depth[b] for b in waits), default=0.0)
            self.depth.append(depth + (self.hidden[self.start[k]] if k in self.start else 0.0))

    def _graph(self) -> list[dict[int, int]]:
        """Returns, for each node, the nodes it waits for and the renaming operations in between."""
        done = {s: d for d, s in self.start.items()}
        writer = {i: done.get(k, k) for k, kernel in enumerate(self.nodes) for i in kernel.writes}
        found: list[dict[int, int]] = []
        for k, kernel in enumerate(self.nodes):
            if k in self.start:
                found.append({self.start[k]: 0})
                continue
            waits = {writer[i]: 1 for i in kernel.after if i in writer}
            for i in kernel.reads:
                if (w := writer.get(i)) is not None:
                    made = self.nodes[self.start.get(w, w)]
                    of_several = len(made.writes) > 1 or made.op.name == "conv_general_dilated"
                    names = of_several + bool(self._view(k, i))
                    waits[w] = max(waits.get(w, 0), names)
            found.append(waits)
        return found

    def _view(self, k: int, i: int) -> int:
        """Returns an id of the shape in which a node reads a value: 0 for the value's own shape.

        Matrix products read matrices, and a split product reads another shape.
        """
        op = self.nodes[k].op
        if op.name != "dot_general":
            return 0
        if "parts" in op.params:
            return 2 + k
        return int(len(self.program.values[i].shape) > 2)

    def scheduled(self) -> list[Kernel]:
        """Returns the nodes in their new order."""
        waits = [len(after) for after in self.after]
        unread = {key: len(nodes) for key, nodes in self.readers.items()}
        ready = _Ready(self)
        for nodes in self.readers.values():
            if len(nodes) == 1:
                ready.reads_last(nodes[0])
        for k, n in enumerate(waits):
            if not n:
                ready.add(k, 0.0)
        at: dict[int, float] = {}
        now, flying, found = 0.0, False, []
        while ready.dones or ready.others:
            k, since = ready.take(now, flying)
            at[k] = max(now, since)
            now = at[k] + self.times[k]
            found.append(k)
            if k in self.start:  # one collective at a time
                flying = True
            else:
                flying = flying and k not in self.starts
                for i in self.nodes[k].reads:
                    key = i, self._view(k, i)
                    unread[key] -= 1
                    if unread[key] == 1:
                        for last in (x for x in self.readers[key] if x not in at):
                            ready.reads_last(last)
            for b, names in self.before[k].items():
                waits[b] -= 1
                if waits[b]:
                    continue
                if k in self.start:
                    ready.add(b, at[k] + self.hidden[b])
                else:
                    last = max(at[a] for a in self.after[b])
                    ready.add(b, max(now + names * _EDGE, last + _EDGE))
        return [self.nodes[k] for k in reversed(found)]


class _Ready:
    """The nodes that may be scheduled next.

    Nodes of one kind differ only in what they alone make ready. Thousands of nodes of a few kinds
    may be ready at once.
    """

    def __init__(self, scheduler: _Scheduler):
        self.scheduler = scheduler
        self.dones = self.others = 0  # how many are ready
        self.made_ready = [0] * len(scheduler.nodes)  # values that a node is the last to read
        self.at_once: dict[tuple[Any, ...], list[tuple[int, int]]] = {}  # heaps, by kind
        self.later: tuple[list[tuple[float, int]], ...] = ([], [])  # heaps of others and dones
        self.waiting: dict[int, float] = {}  # from when on

    def reads_last(self, k: int) -> None:
        """Notes that one more value has this node as its only remaining reader."""
        self.made_ready[k] += 1
        if k in self.waiting:
            self._open(k)

    def add(self, k: int, since: float) -> None:
        """Adds a node that is ready from time `since` on."""
        done = k in self.scheduler.start
        self.dones, self.others = self.dones + done, self.others + (not done)
        heappush(self.later[done], (since, k))

    def take(self, now: float, flying: bool) -> tuple[int, float]:
        """Removes and returns the next node, and the time from which it is ready.

        `flying` says that a collective is in progress, so that no other may start.
        """
        for heap in self.later:
            while heap and heap[0][0] <= now:
                since, k = heappop(heap)
                self.waiting[k] = since
                self._open(k)
        soonest = min((heap[0][0] for heap in self.later if heap), default=None)
        hides = None if soonest is None else soonest - now
        queued, done = self.dones > 0, self.dones > 0 and not flying
        best: tuple[Any, ...] = ()
        for kind, heap in self.at_once.items():
            while heap and not self._is_current(*heap[0]):
                heappop(heap)
            if heap and kind[0] == done:
                first = (*_rank(kind, hides, queued), -heap[0][0], -heap[0][1])
                best = max(best, first)
        if best:
            k, since = best[-1], self.waiting.pop(best[-1])
        else:
            k, since = self._soonest(self.later[done], now, hides, queued)
        self.dones, self.others = self.dones - done, self.others - (not done)
        return k, since

    def _soonest(
        self, heap: list[tuple[float, int]], now: float, hides: float | None, queued: bool
    ) -> tuple[int, float]:
        """Returns the node that is ready earliest, and the best of equally early ones."""
        same = [heappop(heap)]
        while heap and heap[0][0] - now == same[0][0] - now:
            same.append(heappop(heap))
        k, since = max(
            ((k, since) for since, k in same),
            key=lambda x: (*_rank(self._kind(x[0]), hides, queued), self.made_ready[x[0]], x[0]),
        )
        for other in same:
            if other[1] != k:
                heappush(heap, other)
        return k, since

    def _open(self, k: int) -> None:
        heappush(self.at_once.setdefault(self._kind(k), []), (-self.made_ready[k], -k))

    def _is_current(self, made_ready: int, k: int) -> bool:
        return -k in self.waiting and -made_ready == self.made_ready[-k]

    def _kind(self, k: int) -> tuple[bool, bool, float, float, bool]:
        of = self.scheduler
        after_done = any(b in of.start for b in of.before[k])
        return k in of.start, k in of.starts, of.depth[k], of.times[k], after_done


def _rank(
    kind: tuple[bool, bool, float, float, bool], hides: float | None, queued: bool
) -> tuple[Any, ...]:
    """Returns the sort key of nodes that are ready at the same time; the last of a step is first.

    The key makes the comparisons of XLA's `ReadySetLt`, in its order.

    Args:
      kind: whether it is a `done`, a start; its depth, its time, whether it comes after a `done`.
      hides: microseconds until something else is ready.
      queued: whether a `done` is ready.
    """
    _, start, depth, time, after_done = kind
    waste = 0.0
    if hides is not None:  # what is in flight is best hidden by what takes as long
        waste = float("inf") if start else abs(hides - time)
    return (
        not start or queued or depth > 0,
        start and queued,
        depth,
        -waste,
        after_done,
    )


# Microseconds, and bytes (operations) a microsecond.
_START = {"all-gather": 19.0, "reduce-scatter": 33.0, "all-reduce": 40.0}
_OTHER = 19.0
_WIRE, _MEMORY = 0.38e6, 3.35e6
_PRODUCT, _FLOPS = 6.0, 400e6
_CONVOLUTION = 10.0


def latency(kernel: Kernel, program: TracedProgram) -> float:
    """Returns the microseconds from the start of a collective to its end."""
    kind = COLLECTIVES[kernel.op.name]
    size = max(_bytes(kernel.reads, program), _bytes(kernel.writes, program))
    return _START.get(kind, _OTHER) + size * (2 if kind == "all-reduce" else 1) / _WIRE


def time_of(kernel: Kernel, program: TracedProgram) -> float:
    """Returns the microseconds of a kernel that is not a collective; a loop counts as 0 there."""
    if kernel.op.bodies:
        return 0.0
    if kernel.op.name == "conv_general_dilated":
        return _CONVOLUTION
    if flops := flops_of_op(kernel.op, program):
        return _PRODUCT + flops / _FLOPS
    return _bytes((*kernel.reads, *kernel.writes), program) / _MEMORY


def _bytes(numbers: Sequence[int], program: TracedProgram) -> int:
    return sum(program.values[i].bytes for i in numbers)


def padded_kernel(
    image: Sequence[int], kernel: Sequence[int], params: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Returns the shape of the padded copy of a convolution's kernel; None if there is none.

    A kernel that is larger than what it is moved over changes places with it in XLA
    (`SwapConvOperands`), and what is moved over has its padding written out for cuDNN unless that
    is the same on both sides: of a kernel of 3 x 3 for images of 2 x 2 a copy of 6 x 6.

    Args:
      image: shape of the left operand.
      kernel: shape of the right operand.
      params: of the `conv_general_dilated`.
    """
    spec = params["dimension_numbers"]
    sizes = [image[d] for d in spec.lhs_spec[2:]]
    widths = [kernel[d] for d in spec.rhs_spec[2:]]
    if math.prod(widths) <= math.prod(sizes):
        return None
    shape, even = list(kernel), True
    for d, size, width, wide, apart, (low, high) in zip(
        spec.rhs_spec[2:], sizes, widths,
        params["lhs_dilation"], params["rhs_dilation"], params["padding"], strict=True,
    ):  # fmt: skip
        moved = (size - 1) * wide - (width - 1) * apart
        even &= low == high
        shape[d] += max(0, low + moved) + max(0, high + moved)
    return None if even else tuple(shape)
