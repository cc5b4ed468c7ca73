"""Which values of a program become buffers: a model of how XLA fuses.

An element-wise operation and one that only moves elements is computed where its result is read, as
often as it is read. Its result becomes a buffer where something reads it that computes from memory
(a matrix product, a collective, a loop), and where it is dear and read by several kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.forecast.combine import Kernel, combined
from gshard.forecast.program import FREE, RESHAPED, Op, Program

# Computed once, if several kernels read them: `InstructionFusion::IsExpensive` of XLA.
_DEAR = {
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "rsqrt",
    "sqrt", "cbrt", "div", "pow", "sin", "cos", "tan", "atan2", "rem", "lgamma", "digamma",
}  # fmt: skip
_CHEAP = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "complex", "concatenate",
    "convert_element_type", "dynamic_slice", "eq", "eq_to", "floor", "gather", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "one_minus_square", "or", "pad", "real", "rev", "round", "select_n",
    "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "slice", "split", "square", "stack",
    "sub", "transpose", "xor", "population_count", "clz",
}  # fmt: skip
_SUMMED = ("mul", "square", "integer_pow", "convert_element_type")
_NOTHING = {"iota", "constant", "axis_index", "rng_bit_generator_state"}
IN_PLACE = {"dynamic_update_slice", "scatter-add", "scatter", "scatter_add", "scatter_mul", "sort"}


def absorbs(name: str) -> bool:
    """Whether a kernel of this operation computes its operands itself."""
    return (
        name in _CHEAP
        or name in _DEAR
        or name.startswith(("reduce_", "arg", "cum"))
        or (name in ("dynamic_update_slice", "stack_slice", "reduce_and"))
    )


def fusible(name: str) -> bool:
    """Whether the operation can be computed where its result is read."""
    return name in _CHEAP or name in _DEAR


@dataclass
class Fused:
    """A program as kernels on buffers.

    Attributes:
      program: what was fused.
      kernels: in the order of the trace.
      buffer: of a value, the value whose buffer holds it; FREE for none.
    """

    program: Program
    kernels: list[Kernel] = field(default_factory=list)
    buffer: dict[int, int] = field(default_factory=dict)


def fused(program: Program, platform: str) -> Fused:
    """The kernels of a program."""
    view = _views(program)

    def root(i: int) -> int:
        while i in view:
            i = view[i]
        return i

    made = {out: op for op in program.ops for out in op.outs if out not in view}
    users: dict[int, list[tuple[Op, int]]] = defaultdict(list)  # of a root
    place = {id(op): k for k, op in enumerate(program.ops)}
    for op in program.ops:
        if op.outs and op.outs[0] in view:
            continue
        for i in op.ins:
            if i != FREE:
                users[root(i)].append((op, place[id(op)]))
    direct: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        for i in op.ins:
            direct[i].append(op)
    results = {root(i) for i in program.outputs if i != FREE}

    # The kernels that each operation is computed in; from the end, so that readers are known.
    kernels_of: dict[int, set[int]] = {}
    stored: set[int] = set()
    nothing: set[int] = set()
    constant = _constants(program, root)
    for k in range(len(program.ops) - 1, -1, -1):
        op = program.ops[k]
        if op.outs[0] in view:
            continue
        readers = {at for out in op.outs for _, at in users[out]}
        within = set().union(*(kernels_of[at] for at in readers)) if readers else set()
        if all(out in constant for out in op.outs):
            read_whole = any(not absorbs(o.name) for out in op.outs for o, _ in users[out])
            if not (read_whole and platform == "cpu") and not results.intersection(op.outs):
                nothing.update(op.outs)
                kernels_of[k] = within
                continue
        alone = fusible(op.name) and not results.intersection(op.outs)
        alone = alone and all(absorbs(o.name) for out in op.outs for o, _ in users[out])
        if alone and platform == "cpu" and op.name in _DEAR and len(within) > 1:
            alone = False
        if alone and platform == "cpu":
            alone = _into_reductions(op, users, [program.ops[at] for at in within])
        if alone:
            kernels_of[k] = within
        else:
            kernels_of[k] = {k}
            stored.update(op.outs)

    result = Fused(program)
    memo: dict[int, frozenset[int]] = {}

    def reads(i: int) -> frozenset[int]:
        """The buffers that a value is computed from."""
        if i in memo:
            return memo[i]
        if i in nothing:
            found: frozenset[int] = frozenset()
        elif i in stored or i not in made:
            found = frozenset([i])
        else:
            found = frozenset().union(*(reads(root(j)) for j in made[i].ins if j != FREE))
        memo[i] = found
        return found

    barred = {
        out: op.ins for op in program.ops if op.name == "optimization_barrier" for out in op.outs
    }
    known: dict[int, frozenset[int]] = {}

    def after(i: int) -> frozenset[int]:
        """The buffers that a value waits for without reading them."""
        if i in known:
            return known[i]
        found: frozenset[int] = frozenset()
        if i in barred:
            found = frozenset().union(*(reads(root(j)) for j in barred[i]))
            found |= frozenset().union(*(after(j) for j in barred[i]))
        elif i in view:
            found = after(view[i])
        elif i in made and i not in stored:
            found = frozenset().union(*(after(j) for j in made[i].ins if j != FREE))
        known[i] = found
        return found

    for k, op in enumerate(program.ops):
        if op.outs[0] in view or not stored.intersection(op.outs):
            for i in op.ins:  # in order, so that the recursion stays flat
                if i != FREE:
                    reads(root(i))
                    after(i)
            continue
        found = dict.fromkeys(j for i in op.ins if i != FREE for j in sorted(reads(root(i))))
        late = any(o.name == "transpose" and o.outs[0] in view for o in direct[op.outs[0]])
        waits = frozenset().union(*(after(i) for i in op.ins if i != FREE)) - set(found)
        result.kernels.append(
            Kernel(op, list(found), list(op.outs), k, absorbs(op.name), sorted(waits), late)
        )
    result.kernels = combined(result.kernels, program.values, platform)
    for i in (*program.inputs, *stored):
        result.buffer[i] = i
    for i in program.outputs:
        if i != FREE:
            result.buffer[i] = root(i)
    return result


def _into_reductions(op: Op, users: Any, kernels: Sequence[Op]) -> bool:
    """Whether XLA:CPU computes an operation within these kernels, as far as they are reductions.

    A reduction there computes the product that it sums, and reads all else.
    """
    direct = {id(user) for out in op.outs for user, _ in users[out]}
    return all(
        id(kernel) in direct and op.name in _SUMMED
        for kernel in kernels
        if kernel.name.startswith(("reduce_", "arg"))
    )


def _views(program: Program) -> dict[int, int]:
    """Results that are their operand's buffer under another shape."""
    view: dict[int, int] = {}
    count: dict[int, int] = defaultdict(int)
    made = {out: op for op in program.ops for out in op.outs}
    for op in program.ops:
        for i in op.ins:
            count[i] += 1
    for op in program.ops:
        if op.name in (*RESHAPED, "optimization_barrier", "rev"):
            view.update({o: i for i, o in zip(op.ins, op.outs, strict=False) if i != FREE})
        elif op.name == "transpose" and op.ins[0] != FREE:
            source = made.get(op.ins[0])
            # A product is written the other way round for it.
            if source is not None and source.name == "dot_general" and count[op.ins[0]] == 1:
                view[op.outs[0]] = op.ins[0]
        elif op.name == "reshard" and op.ins[0] != FREE:
            a, b = program.values[op.ins[0]], program.values[op.outs[0]]
            if a.bytes == b.bytes:
                view[op.outs[0]] = op.ins[0]
    return view


def _constants(program: Program, root: Any) -> set[int]:
    """Values that follow from no input."""
    found: set[int] = set()
    for op in program.ops:
        if (
            op.name in _NOTHING
            or (fusible(op.name) or op.name in RESHAPED)
            and all(i == FREE or i in found or root(i) in found for i in op.ins)
        ):
            found.update(op.outs)
    return found
