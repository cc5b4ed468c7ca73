"""The order that XLA:GPU makes so that computation runs while collectives do.

A model of its `LatencyHidingScheduler`, which takes the order of least memory and makes another,
from the end to the beginning, without regard to memory. (Where more than half of the device's is
taken it heeds that too, which is not modelled.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gshard.footprint.combine import Kernel
from gshard.footprint.fusion import Fused
from gshard.footprint.kernel_times import latency, time_of
from gshard.footprint.program import COLLECTIVES, Op

_EDGE = 1.0  # microseconds from a kernel to one that waits for it


def latency_hidden(whole: Fused, order: Sequence[Kernel]) -> list[Kernel]:
    """Kernels in the order of XLA:GPU.

    A collective is two of them: its start, which writes the results, and a `done` that reads its
    operands and results, so that they live until then.

    Args:
      whole: the program.
      order: of its kernels, where nothing else decides.
    """
    if not any(kernel.op.name in COLLECTIVES for kernel in order):
        return list(order)
    return _Scheduler(whole, order).scheduled()


class _Scheduler:
    """Nodes are numbered in the order that is given; `start` is by the number of a `done`."""

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
        self.views: dict[tuple[int, int], int] = defaultdict(int)  # readers of a value, by view
        for k, kernel in enumerate(self.nodes):
            for i in () if k in self.start else kernel.reads:
                self.views[i, self._view(k, i)] += 1
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
        """Of every node, what it waits for, and through how many operations that only rename."""
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
        """Under which shape a node reads a value: 0 as it is.

        Matrix products read matrices, and one that is split a shape of its own.
        """
        op = self.nodes[k].op
        if op.name != "dot_general":
            return 0
        if "parts" in op.params:
            return 2 + k
        return int(len(self.program.values[i].shape) > 2)

    def scheduled(self) -> list[Kernel]:
        """The nodes in their new order."""
        waits = [len(after) for after in self.after]
        ready = {k: 0.0 for k, n in enumerate(waits) if not n}  # and from when on
        at: dict[int, float] = {}
        now, flying, found = 0.0, False, []
        while ready:
            soonest = min((t for t in ready.values() if t > now), default=None)
            queued = any(k in self.start for k in ready)
            able = [k for k in ready if not (flying and k in self.start)]
            k = max(able, key=lambda k: self._rank(k, ready[k] - now, soonest, queued, now))
            at[k] = max(now, ready.pop(k))
            now = at[k] + self.times[k]
            found.append(k)
            if k in self.start:  # one collective at a time
                flying = True
            else:
                flying = flying and k not in self.starts
                for i in self.nodes[k].reads:
                    self.views[i, self._view(k, i)] -= 1
            for b, names in self.before[k].items():
                waits[b] -= 1
                if waits[b]:
                    continue
                if k in self.start:
                    ready[b] = at[k] + self.hidden[b]
                else:
                    last = max(at[a] for a in self.after[b])
                    ready[b] = max(now + names * _EDGE, last + _EDGE)
        return [self.nodes[k] for k in reversed(found)]

    def _rank(
        self, k: int, stall: float, soonest: float | None, queued: bool, now: float
    ) -> tuple[Any, ...]:
        """What is put before all others that are ready, the last of a step first.

        The comparisons of `ReadySetLt` of XLA, in its order.
        """
        start = k in self.starts
        waste = 0.0
        if soonest is not None:  # what is in flight is best hidden by what takes as long
            waste = float("inf") if start else abs(soonest - now - self.times[k])
        return (
            k in self.start,
            -max(stall, 0.0),
            not start or queued or self.depth[k] > 0,
            start and queued,
            self.depth[k],
            -waste,
            any(b in self.start for b in self.before[k]),
            self._made_ready(k),
            k,
        )

    def _made_ready(self, k: int) -> int:
        """How many values a node is the last to read."""
        if k in self.start:
            return 0
        return sum(self.views[i, self._view(k, i)] == 1 for i in self.nodes[k].reads)
