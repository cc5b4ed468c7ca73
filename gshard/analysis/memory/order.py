"""The order in which a compiler runs the kernels of a program."""

from __future__ import annotations

from collections import deque

from gshard.analysis.memory.combine import Kernel, waits_for
from gshard.analysis.memory.fusion import Fused


def _graph(whole: Fused) -> tuple[list[set[int]], list[list[int]]]:
    """Of every kernel, those it waits for, and those that wait for it."""
    before = waits_for(whole.kernels)
    after: list[list[int]] = [[] for _ in whole.kernels]
    for k, waits in enumerate(before):
        for b in waits:
            after[b].append(k)
    return before, after


def breadth_first(whole: Fused) -> list[Kernel]:
    """As XLA:CPU does: what is ready first runs first (`BFScheduler`)."""
    before, after = _graph(whole)
    waits = [len(b) for b in before]
    ready = deque(k for k, n in enumerate(waits) if not n)
    found = []
    while ready:
        k = ready.popleft()
        found.append(whole.kernels[k])
        for r in sorted(after[k], key=lambda r: (whole.kernels[r].late, r)):
            waits[r] -= 1
            if not waits[r]:
                ready.append(r)
    return found


def depth_first(whole: Fused) -> list[Kernel]:
    """Operands before what reads them, from the results; what most hangs on first.

    One of the three orders that XLA:GPU chooses from by memory (`DFSMemoryScheduler`), before it
    hides the latency of collectives.
    """
    before, after = _graph(whole)
    sizes = whole.program.values
    most = 1 << 62
    extra, total = [0] * len(before), [0] * len(before)
    for k, kernel in enumerate(whole.kernels):
        extra[k] = max(0, len(after[k]) - 1) + sum(extra[b] for b in before[k])
        total[k] = sum(sizes[i].bytes for i in kernel.writes) + sum(total[b] for b in before[k])
        extra[k], total[k] = min(extra[k], most), min(total[k], most)
    place = {i: k for k, kernel in enumerate(whole.kernels) for i in kernel.writes}
    ends = [place[j] for i in whole.program.outputs if (j := whole.buffer.get(i, i)) in place]
    ends += [k for k, readers in enumerate(after) if not readers]

    def sorted_(ks: list[int]) -> list[int]:
        return sorted(ks, key=lambda k: (-extra[k], -total[k], k))

    found, seen = [], set()
    for end in sorted_(list(dict.fromkeys(ends))):
        stack = [(end, False)]
        while stack:
            k, done = stack.pop()
            if done:
                found.append(whole.kernels[k])
            elif k not in seen:
                seen.add(k)
                stack.append((k, True))
                kernel = whole.kernels[k]
                operands = [place[i] for i in (*kernel.reads, *kernel.after) if i in place]
                stack += [(b, False) for b in reversed(sorted_(operands)) if b not in seen]
    return found
