"""Which values of a program become buffers: a model of how XLA fuses.

An element-wise operation and one that only moves elements is computed where its result is read, as
often as it is read. Its result becomes a buffer where something reads it that computes from memory
(a matrix product, a collective, a loop). On CPU it also becomes one where several kernels read it
and it is expensive to compute; XLA:GPU computes it again in each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.analysis.memory.combine import combined
from gshard.analysis.memory.products import with_canonical_products
from gshard.analysis.memory.program import FREE, RESHAPED, Kernel, Op, TracedProgram, views

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
    "split", "square", "stack", "sub", "transpose", "xor", "population_count", "clz",
}  # fmt: skip
_SUMMED = ("mul", "square", "integer_pow", "convert_element_type")
_NOTHING = {"iota", "constant", "axis_index"}
IN_PLACE = {"dynamic_update_slice", "scatter-add", "scatter", "sort"}


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
    if platform == "cpu":
        program = with_canonical_products(program)
    return _Fusion(program, platform).result()


class _Fusion:
    """Decides, from the last operation back, which values become buffers and what kernels read."""

    def __init__(self, program: TracedProgram, platform: str):
        self.program, self.platform = program, platform
        self.view = views(program, platform)
        self.made = {out: op for op in program.ops for out in op.outs if out not in self.view}
        self.results = {self.root(i) for i in program.outputs if i != FREE}
        self.users: dict[int, list[tuple[Op, int]]] = defaultdict(list)  # of a root, and where
        self.barred: dict[int, list[int]] = {}  # what waits behind a barrier: all that is held
        for k, op in enumerate(program.ops):
            if op.name == "optimization_barrier":
                self.barred.update(dict.fromkeys(op.outs, op.ins))
            if not self.is_view(op):
                for i in op.ins:
                    if i != FREE:
                        self.users[self.root(i)].append((op, k))
        self.stored: set[int] = set()
        self.nothing: set[int] = set()  # computed from constants wherever it is read
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
        kernels = []
        for op in self.program.ops:
            own = [i for i in op.ins if i != FREE]
            # Of every operation in order, so that the recursion stays flat.
            reads = dict.fromkeys(j for i in own for j in sorted(self.reads(self.root(i))))
            after = frozenset().union(*map(self.after, own)) - set(reads)
            if not self.is_view(op) and self.stored.intersection(op.outs):
                kernels.append(
                    Kernel(op, list(reads), list(op.outs), absorbs(op.name), sorted(after))
                )
        if self.platform != "cpu":
            kernels = combined(kernels, self.program.values)
        buffer = {i: i for i in (*self.program.inputs, *self.stored)}
        buffer |= {i: self.root(i) for i in self.program.outputs if i != FREE}
        return Fused(self.program, kernels, buffer)

    def _decide(self) -> None:
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
        if not fusible(op.name) or self.results.intersection(op.outs):
            return False
        if not all(absorbs(user.name) for user, _ in users):
            return False
        if self.platform != "cpu":  # XLA:GPU computes even what is dear again, to read less
            return True
        if len(kernels) > 1 and op.name not in _CHEAP:
            return False
        return _into_reductions(op, users, kernels)

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
