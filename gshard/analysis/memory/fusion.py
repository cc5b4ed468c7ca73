"""Which values of a program become buffers: a model of how XLA fuses.

An element-wise operation and one that only moves elements is computed where its result is read, as
often as it is read. Its result becomes a buffer where something reads it that computes from memory
(a matrix product, a collective, a loop), and where several kernels read it and it is dear (CPU) or
made from so much that it is read faster than computed again (GPU).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp

from gshard.analysis.memory.combine import Kernel, combined, siblings_joined
from gshard.analysis.memory.cpu import (
    is_rounded,
    with_canonical_products,
    with_repeated,
    with_widened,
)
from gshard.analysis.memory.program import FREE, NEW_CPU, RESHAPED, Op, TracedProgram, Value, views

# Computed once, if several kernels read them: `InstructionFusion::IsExpensive` of XLA.
_DEAR = {
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "rsqrt",
    "sqrt", "cbrt", "div", "pow", "sin", "cos", "tan", "atan2", "rem", "lgamma", "digamma",
}  # fmt: skip
_CHEAP = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "complex", "concatenate",
    "convert_element_type", "dynamic_slice", "eq", "eq_to", "floor", "gather", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "one_minus_square", "or", "pad", "real", "reorder", "rev", "round",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice",
    "split", "square", "stack", "sub", "sum_parts", "transpose", "xor", "population_count", "clz",
}  # fmt: skip
_LAUNCH = 3.35e6  # bytes that an H100 moves while it starts a kernel
_SUMMED = ("mul", "square", "integer_pow", "convert_element_type")
_NOTHING = {"iota", "constant", "axis_index", "rng_bit_generator_state"}
IN_PLACE = {"dynamic_update_slice", "scatter-add", "scatter", "scatter_add", "scatter_mul", "sort"}


def absorbs(name: str) -> bool:
    """Whether a kernel of this operation computes its operands itself."""
    return (
        name in _CHEAP
        or name in _DEAR
        or (name.startswith(("reduce_", "arg", "cum")) and name != "reduce_scatter")
        or name in ("dynamic_update_slice", "stack_slice")
    )


def fusible(name: str) -> bool:
    """Whether the operation can be computed where its result is read."""
    return name in _CHEAP or name in _DEAR


def _is_cheap(op: Op, program: TracedProgram) -> bool:
    return op.name in _CHEAP and not is_rounded(op, program.values[op.outs[0]])


@dataclass
class Fused:
    """A program as kernels that read and write buffers.

    Attributes:
      program: the program that was fused.
      kernels: its kernels, in the order of the trace.
      buffer: for each value, the value whose buffer contains it; FREE for none.
    """

    program: TracedProgram
    kernels: list[Kernel] = field(default_factory=list)
    buffer: dict[int, int] = field(default_factory=dict)


def fused(program: TracedProgram, platform: str) -> Fused:
    """Returns the kernels of a program, which must not change afterwards."""
    if platform not in program.fused:
        program.fused[platform] = _fused(program, platform)
    return program.fused[platform]


def _fused(program: TracedProgram, platform: str) -> Fused:
    if platform == "gpu":
        program = with_split_products(program)
    if platform == "cpu":
        program = with_canonical_products(program)
        if NEW_CPU:
            cheap = partial(_is_cheap, program=program)
            program = with_repeated(program, cheap, absorbs)
        else:
            program = with_widened(program, absorbs)
    return _Fusion(program, platform).result()


class _Fusion:
    """Decides, from the last operation back, which values become buffers and what kernels read."""

    def __init__(self, program: TracedProgram, platform: str):
        self.program, self.platform = program, platform
        self.view = views(program, platform)
        self.made = {out: op for op in program.ops for out in op.outs if out not in self.view}
        self.results = {self.root(i) for i in program.outputs if i != FREE}
        self.users: dict[int, list[tuple[Op, int]]] = defaultdict(list)  # of a root, and where
        self.folded: set[int] = set()  # products that are written the other way round
        self.barred: dict[int, list[int]] = {}  # what waits behind a barrier: all that is held
        for k, op in enumerate(program.ops):
            if op.name == "optimization_barrier":
                self.barred.update(dict.fromkeys(op.outs, op.ins))
            if not self.is_view(op):
                for i in op.ins:
                    if i != FREE:
                        self.users[self.root(i)].append((op, k))
            elif op.name == "transpose":
                self.folded.add(op.ins[0])
        self.stored: set[int] = set()
        self.nothing: set[int] = set()  # computed from constants wherever it is read
        self.kept: set[int] = set()  # stored, as it looked at first
        self._sources: dict[int, frozenset[int]] = {}
        self._reads: dict[int, frozenset[int]] = {}
        self._after: dict[int, frozenset[int]] = {}

    def root(self, i: int) -> int:
        """Returns the value that value `i` is a view of."""
        while i in self.view:
            i = self.view[i]
        return i

    def is_view(self, op: Op) -> bool:
        return op.outs[0] in self.view

    def result(self) -> Fused:
        self._decide()
        if self.platform == "gpu":  # again: what is stored need not be computed from more
            self.kept, self.stored, self.nothing = self.stored, set(), set()
            self._decide()
        kernels = []
        for k, op in enumerate(self.program.ops):
            own = [i for i in op.ins if i != FREE]
            # Of every operation in order, so that the recursion stays flat.
            reads = dict.fromkeys(j for i in own for j in sorted(self.reads(self.root(i))))
            after = frozenset().union(*map(self.after, own)) - set(reads)
            if not self.is_view(op) and self.stored.intersection(op.outs):
                late = op.outs[0] in self.folded
                kernels.append(
                    Kernel(op, list(reads), list(op.outs), k, absorbs(op.name), sorted(after), late)
                )
        if self.platform == "gpu":
            alone = [fusible(kernel.op.name) for kernel in kernels]
            kernels = siblings_joined(kernels, self.program.values, alone)
        kernels = combined(kernels, self.program.values, self.platform)
        buffer = {i: i for i in (*self.program.inputs, *self.stored)}
        buffer |= {i: self.root(i) for i in self.program.outputs if i != FREE}
        return Fused(self.program, kernels, buffer)

    def _decide(self) -> None:
        self._sources = {}
        for op in self.program.ops:  # in order, so that the recursion stays flat
            if not self.is_view(op):
                self.sources(op.outs[0])
        ops, constant = self.program.ops, _constants(self.program, self.root)
        kernels_of: dict[int, set[int]] = {}  # by operation, the kernels that it is computed in
        for k in range(len(ops) - 1, -1, -1):
            op = ops[k]
            if self.is_view(op):
                continue
            users = [user for out in op.outs for user in self.users[out]]
            within = set().union(*(kernels_of[at] for _, at in users))
            free = constant.issuperset(op.outs) and not self.results.intersection(op.outs)
            read = self.platform != "cpu" or all(absorbs(user.name) for user, _ in users)
            if free and read and len(op.outs) == 1:
                self.nothing.update(op.outs)
                kernels_of[k] = within
            elif self._computed_where_read(op, users, [ops[at] for at in within]):
                kernels_of[k] = within
            else:
                kernels_of[k] = {k}
                self.stored.update(op.outs)

    def _computed_where_read(
        self, op: Op, users: Sequence[tuple[Op, int]], kernels: Sequence[Op]
    ) -> bool:
        if op.held or not fusible(op.name) or self.results.intersection(op.outs):
            return False
        if not all(absorbs(user.name) for user, _ in users):
            return False
        if self.platform != "cpu":  # XLA:GPU computes even what is dear again, to read less
            if op.name == "sum_parts":  # and what is written in place is computed before
                return len(kernels) == 1 and kernels[0].name not in IN_PLACE
            return self.platform != "gpu" or not self._read_too_often(op, len(kernels))
        if len(kernels) > 1 and not _is_cheap(op, self.program):
            return False
        return _into_reductions(op, users, kernels)

    def _read_too_often(self, op: Op, kernels: int) -> bool:
        """Whether it takes longer to compute a value in every kernel than to store it once."""
        size = self.program.values[op.outs[0]].bytes
        sources = frozenset().union(*(self.sources(self.root(j)) for j in op.ins if j != FREE))
        read = sum(each for i in sources if (each := self.program.values[i].bytes) >= size)
        return (kernels - 1) * read - (kernels + 1) * size > _LAUNCH

    def sources(self, i: int) -> frozenset[int]:
        """Returns the sources of a value if all fusible operations are computed where read."""
        if i not in self._sources:
            op = self.made.get(i)
            found = frozenset([i])
            if op is not None and fusible(op.name) and i not in self.kept:
                found = frozenset().union(
                    *(self.sources(self.root(j)) for j in op.ins if j != FREE)
                )
            self._sources[i] = found
        return self._sources[i]

    def reads(self, i: int) -> frozenset[int]:
        """Returns the buffers that a value is computed from."""
        if i not in self._reads:
            if i in self.nothing:
                found: frozenset[int] = frozenset()
            elif i in self.stored or i not in self.made:
                found = frozenset([i])
            else:
                own = (self.root(j) for j in self.made[i].ins if j != FREE)
                found = frozenset().union(*map(self.reads, own))
            self._reads[i] = found
        return self._reads[i]

    def after(self, i: int) -> frozenset[int]:
        """Returns the buffers that a value waits for because of a barrier, without reading them."""
        if i not in self._after:
            found: frozenset[int] = frozenset()
            if i in self.barred:
                held = self.barred[i]
                found = found.union(*(self.reads(self.root(j)) for j in held))
                found = found.union(*map(self.after, held))
            elif i in self.view:
                found = self.after(self.view[i])
            elif i in self.made and i not in self.stored:
                found = found.union(*(self.after(j) for j in self.made[i].ins if j != FREE))
            self._after[i] = found
        return self._after[i]


def _into_reductions(op: Op, users: Sequence[tuple[Op, int]], kernels: Sequence[Op]) -> bool:
    """Whether XLA:CPU computes an operation within these kernels, as far as they are reductions.

    A reduction there computes the product that it sums, and reads all else.
    """
    direct = {id(user) for user, _ in users}
    return all(
        id(kernel) in direct and op.name in _SUMMED
        for kernel in kernels
        if kernel.name.startswith(("reduce_", "arg"))
    )


def _constants(program: TracedProgram, root: Any) -> set[int]:
    """Returns the values that depend on no input."""
    found: set[int] = set()
    for op in program.ops:
        if (
            op.name in _NOTHING
            or (fusible(op.name) or op.name in RESHAPED)
            and all(i == FREE or i in found or root(i) in found for i in op.ins)
        ):
            found.update(op.outs)
    return found


# Of an H100: `SplitkRewriter` of XLA, with its weights for Hopper, in units of its own.
_CORES, _TILE = 132, 128

_COMPUTE, _MEMORY, _SUM_MEMORY, _SUM_LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7

_PARTS = tuple(1 << n for n in range(12))


def with_split_products(program: TracedProgram) -> TracedProgram:
    """Returns the program with each split product as partial sums and a `sum_parts` of them.

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
    """Returns the number of partial sums with the lowest cost when XLA:GPU splits a matrix product.

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
    """Returns XLA's `EstimateGemmCostAfterSplitK` for `b` products of (m, k) and (k, n)."""
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
