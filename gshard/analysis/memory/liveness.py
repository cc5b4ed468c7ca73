"""Finds the peak memory of a program: orders its kernels and tracks which buffers are live."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from gshard.analysis.memory.combine import graph_of
from gshard.analysis.memory.fusion import IN_PLACE, Fused, fused
from gshard.analysis.memory.program import FREE, NEW_CPU, Kernel, Op, TracedProgram

Order = Callable[[Fused], list[Kernel]]
# The compilers of GPUs and TPUs overlap collectives with kernels, which lengthens the lives of
# buffers. Chosen to suit the compiler's figures for the models of benchmarks/footprint_unseen.py
# (docs/development/planner-accuracy.md).
_OVERLAP = 1.15


def peak_of(program: TracedProgram, platform: str) -> int:
    """Returns the largest sum of bytes of a program's live buffers, without its inputs.

    A result that takes over the memory of an input needs none of its own.

    XLA:CPU runs kernels breadth-first. Other compilers run them in an order between that of the
    trace, in which a layer's weight gradient is computed with the layer's other gradients, and
    depth-first, in which all weight gradients come last and keep their operands until then. The
    estimate is the mean of the two.
    """
    if platform == "cpu":
        return _peak_in(program, platform, breadth_first)
    found = [_peak_in(program, platform, order) for order in (_as_traced, depth_first)]
    return round(_OVERLAP * sum(found) / 2)


def _peak_in(program: TracedProgram, platform: str, order: Order) -> int:
    whole = fused(program, platform)
    bodies = {id(body): body for kernel in whole.kernels for body in kernel.op.bodies}
    inner = {key: _peak_in(body, platform, order) for key, body in bodies.items()}
    wide = platform == "cpu" and not NEW_CPU
    return _simulated(whole, order(whole), inner, wide)


def _simulated(whole: Fused, order: Sequence[Kernel], peaks: dict[int, int], wide: bool) -> int:
    """Follows which buffers are live; with `wide`, kernels write 16-bit floats as float32."""
    program = whole.program
    sizes = program.values
    last: dict[int, int] = {}
    for k, kernel in enumerate(order):
        for i in kernel.reads:
            last[i] = k
        for i in kernel.writes:
            last.setdefault(i, k)
    end = len(order)
    outputs = [FREE if i == FREE else whole.buffer.get(i, i) for i in program.outputs]
    donor = {outputs[o]: program.inputs[i] for o, i in program.kept if outputs[o] != FREE}
    for i in outputs:
        if i != FREE:
            last[i] = end
    dies: dict[int, list[int]] = defaultdict(list)
    for i, k in last.items():
        dies[k].append(i)
    live: dict[int, int] = {}
    total, peak = 0, 0
    taken: set[int] = set()
    for k, kernel in enumerate(order):
        extra = max((peaks[id(body)] for body in kernel.op.bodies), default=0)
        handed_on = {(kernel.op.ins[a], kernel.op.outs[b]) for a, b in kernel.op.carried}
        dying = [i for i in dies[k] if i in live and i not in kernel.writes]
        for place, i in enumerate(kernel.writes):
            # A slice is written into its stack, which the loop's operation has.
            size = 0 if kernel.op.name == "stack_slice" else sizes[i].bytes
            if wide and sizes[i].dtype in (jnp.bfloat16, jnp.float16) and not kernel.op.bodies:
                size = 4 * sizes[i].size
            own = donor.get(i)
            if own is not None and own not in taken:
                free = last.get(own, -1)
                in_place = kernel.elementwise or (own, i) in handed_on
                if free < k or (free == k and in_place):
                    taken.add(own)
                    live[i] = 0
                    continue
            shared = _shared(kernel, place, size, dying, live)
            if shared is not None:
                dying.remove(shared)
                total -= live.pop(shared)
            live[i] = size
            total += size
        peak = max(peak, total + extra)
        for i in dies[k]:
            if i in live:
                total -= live.pop(i)
    return peak


def _shared(
    kernel: Kernel, place: int, size: int, dying: list[int], held: dict[int, int]
) -> int | None:
    """Returns an operand whose memory a result takes over, or None."""
    pairs = kernel.op.carried
    if pairs:
        for a, b in pairs:
            if b == place and kernel.op.ins[a] in dying:
                return kernel.op.ins[a]
        return None
    if kernel.elementwise or kernel.op.name in IN_PLACE:
        for i in dying:
            if held[i] == size:
                return i
    return None


def _as_traced(whole: Fused) -> list[Kernel]:
    return whole.kernels


def breadth_first(whole: Fused) -> list[Kernel]:
    """Orders kernels as XLA:CPU does: what is ready first runs first (`BFScheduler`)."""
    before, after = graph_of(whole.kernels)
    waits = [len(b) for b in before]
    ready = deque(k for k, n in enumerate(waits) if not n)
    found = []
    while ready:
        k = ready.popleft()
        found.append(whole.kernels[k])
        for r in sorted(after[k]):
            waits[r] -= 1
            if not waits[r]:
                ready.append(r)
    return found


def depth_first(whole: Fused) -> list[Kernel]:
    """Orders kernels depth-first from the results: operands first, those with most users first.

    It is one of three among which XLA:GPU chooses (`DFSMemoryScheduler`).
    """
    before, after = graph_of(whole.kernels)
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


def with_own_zeros(program: TracedProgram) -> TracedProgram:
    """Returns a program whose broadcasts return one value for each operation that overwrites them.

    Equal broadcasts are one for XLA, such as the zeros that gradients of tables start as. What is
    written into is copied for all but one of the writers, right where it is made.
    """
    made = {op.outs[0] for op in program.ops if _of_a_constant(op)}
    written = Counter(op.ins[0] for op in program.ops if op.name in IN_PLACE and op.ins[0] in made)
    several = {i: n for i, n in written.items() if n > 1}
    if not several:
        return program
    program = dataclasses.replace(program, values=list(program.values))
    copies = {
        i: [i, *(program.new(program.values[i]) for _ in range(n - 1))] for i, n in several.items()
    }
    left = {i: list(own) for i, own in copies.items()}
    ops = []
    for op in program.ops:
        if op.outs[0] in copies:
            op = dataclasses.replace(op, outs=copies[op.outs[0]])
        elif op.name in IN_PLACE and op.ins[0] in left:
            op = dataclasses.replace(op, ins=[left[op.ins[0]].pop(0), *op.ins[1:]])
        ops.append(op)
    return dataclasses.replace(program, ops=ops)


def _of_a_constant(op: Op) -> bool:
    return op.name == "broadcast_in_dim" and all(i == FREE for i in op.ins)
