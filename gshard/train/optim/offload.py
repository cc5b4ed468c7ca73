"""Offloaded state: stored in host memory, and updated on the device in groups.

An update is traced and split into groups of equations that use the same arrays of the host. A group
is copied to the device once the group before it is on its way back and the one before that is
computed. A large stack of layers is updated in chunks. So little of the state is on the device at a
time. Quantized arrays on the device are updated in groups too, so that few of them are decoded at
a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from gshard._util.jaxpr import JIT, Bindings, bind_in_scope, body_of, evaluate, in_scope
from gshard._util.pytree import flatten, map_leaves, same_leaves
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan

Update = Callable[[Any, Any], tuple[Any, Any]]


def update_through_device(fun: Update, state: Any, params: Any, plan: Plan) -> tuple[Any, Any]:
    """Computes `fun(state, params)`, new parameters and state, and copies them back to the host."""
    if not any(map(_is_grouped, jax.tree.leaves((plan.params, plan.opt_state, plan.master)))):
        return fun(state, params)
    closed, shapes, groups = _trace(fun, state, params, plan)
    results = _evaluate_groups(closed, groups, jax.tree.leaves((params, state)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def transfer_sizes(fun: Update, state: Any, params: Any, plan: Plan) -> tuple[int, ...]:
    """Returns the bytes per device of each copy of `update_through_device` from the host."""
    groups = _trace(fun, state, params, plan)[2]
    layouts = jax.tree.leaves((plan.params, plan.layouts.opt_state))

    def size(group: TransferGroup) -> int:
        return sum(layouts[i].bytes_per_device for i in group.inputs if layouts[i].on_host)

    found = (size(group) // group.chunks for group in groups for _ in range(group.chunks))
    return tuple(n for n in found if n)


def to_device(tree: Any, layouts: Any) -> Any:
    """Copies the offloaded arrays of a tree to the device."""
    return _moved(tree, layouts, lambda x, _: jax.device_put(x, jax.memory.Space.Device))


def to_host(tree: Any, layouts: Any, plan: Plan) -> Any:
    """Copies the arrays of a tree that the plan offloads to the host."""
    return _moved(tree, layouts, lambda x, layout: jax.device_put(x, plan.sharding(layout)))


def _moved(tree: Any, layouts: Any, move: Callable[[Any, Layout], Any]) -> Any:
    return map_leaves(lambda x, p: move(x, p) if p.on_host else x, tree, layouts)


def _trace(
    fun: Update, state: Any, params: Any, plan: Plan
) -> tuple[Any, Any, list[TransferGroup]]:
    """Traces `fun(params, state)` with host copies; returns jaxpr, result shapes and groups."""
    state_layouts = plan.layouts.opt_state
    same_leaves(state, flatten(state_layouts)[0], "the optimizer state is")
    same_leaves(params, flatten(plan.params)[0], "the parameters are")

    def through_device(params: Any, state: Any) -> tuple[Any, Any]:
        new, after = fun(to_device(state, state_layouts), to_device(params, plan.params))
        return to_host(new, plan.params, plan), to_host(after, state_layouts, plan)

    traced, shapes = jax.make_jaxpr(through_device, return_shape=True)(params, state)
    leaves = jax.tree.leaves((params, state))
    closed = jax.make_jaxpr(lambda args: _without_jit(traced.jaxpr, traced.consts, args))(leaves)
    layouts = jax.tree.leaves((plan.params, state_layouts))
    return closed, shapes, transfer_groups(closed.jaxpr, layouts)


def _without_jit(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with its calls of `jit` inlined, so that groups see all equations."""

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == JIT:
            with in_scope(eqn):  # the names in its body are relative to it
                return _without_jit(*body_of(eqn), values)
        return bind_in_scope(eqn, values)

    return evaluate(jaxpr, consts, args, run)


def _evaluate_groups(
    closed: Any, groups: Sequence[TransferGroup], args: Sequence[Any]
) -> list[Any]:
    """Evaluates the equations that belong to no group, then one group after the other."""
    jaxpr = closed.jaxpr
    scope = Bindings([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args])
    grouped = {number for group in groups for number in group.equations}
    for number, eqn in enumerate(jaxpr.eqns):
        if number not in grouped:
            scope.run(eqn)
    sent: list[Any] = []  # what the previous group copies back to the host
    done: list[list[Any]] = [[], []]  # results by group
    for group in groups:
        inputs = [jaxpr.invars[i] for i in group.inputs]
        # Without this order the compiler copies everything to the device at once.
        waited, *_ = lax.optimization_barrier((scope.read(inputs), sent, done[-2]))
        scope.write(inputs, waited)
        equations = [jaxpr.eqns[number] for number in group.equations]
        made = {v for eqn in equations for v in eqn.outvars}
        indices = [i for i, v in enumerate(jaxpr.outvars) if isinstance(v, core.Var) and v in made]
        if group.chunks > 1:
            _run_in_chunks(scope, equations, jaxpr, indices, group)
        else:
            for eqn in equations:
                scope.run(eqn)
        done.append(scope.read([jaxpr.outvars[i] for i in indices]))
        sent = [x for x in done[-1] if _on_host(x)]
    return scope.read(jaxpr.outvars)


def _run_in_chunks(
    scope: Bindings,
    equations: Sequence[Any],
    jaxpr: Any,
    indices: Sequence[int],
    group: TransferGroup,
) -> None:
    """Runs a group in chunks; `indices` are those of its results and of what they replace."""
    made = {v for eqn in equations for v in eqn.outvars}
    used = list({v: None for eqn in equations for v in variables_of(eqn.invars) if v not in made})
    results = [jaxpr.outvars[i] for i in indices]
    replaced = [jaxpr.invars[i] for i in indices]
    in_place = [
        _on_host(new) and new.aval == old.aval for new, old in zip(results, replaced, strict=True)
    ]
    size = jaxpr.invars[group.inputs[0]].aval.shape[0]
    rows = size // group.chunks

    def run_chunk(i: Any, now: list[jax.Array]) -> list[jax.Array]:
        full = Bindings(used, scope.read(used))
        for old, x, same in zip(replaced, now, in_place, strict=True):
            if same:
                full.write([old], [x])
        slices = [
            lax.dynamic_slice_in_dim(x, i * rows, rows) if jnp.shape(x)[:1] == (size,) else x
            for x in full.read(used)  # others are scalars and (1, n), which all rows share
        ]
        chunk = Bindings(used, slices)
        for eqn in equations:
            chunk.run(eqn)
        return [
            lax.dynamic_update_slice_in_dim(x, new, i * rows, 0)
            for x, new in zip(now, chunk.read(results), strict=True)
        ]

    start = scope.read(replaced)
    for i, new in enumerate(results):
        if not in_place[i]:
            zeros = jnp.zeros(new.aval.shape, new.aval.dtype)
            start[i] = jax.device_put(zeros, jax.memory.Space.Host) if _on_host(new) else zeros
    scope.write(results, lax.fori_loop(0, group.chunks, run_chunk, start))


def _is_quantized(layout: Layout) -> bool:
    return layout.dtype == jnp.int8 and layout.path.endswith("/codes")


def _is_grouped(layout: Layout) -> bool:
    """Whether an array takes more memory of the device while it is updated than before."""
    return layout.on_host or _is_quantized(layout)


def _on_host(x: Any) -> bool:
    return x.aval.memory_space == jax.memory.Space.Host


GROUP_SIZE = 2**24  # bytes on one device, decoded
_DECODED = 4  # bytes of a quantized entry

# Elementwise operations, which give the same result for a chunk of rows as for all rows.
_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos device_put div eq erf "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sharding_constraint sign sin "
    "sqrt square stop_gradient sub tan tanh xor".split()
)


@dataclass(frozen=True)
class TransferGroup:
    """Equations that use the same arrays of the host, or the same quantized arrays."""

    size: int  # bytes of these arrays on one device, decoded
    inputs: list[int]  # indices of these arrays among the inputs
    equations: list[int]  # indices of the equations in the program
    chunks: int = 1  # along dimension 0, which are updated one after the other

    def __add__(self, other: TransferGroup) -> TransferGroup:
        return TransferGroup(
            self.size + other.size,
            self.inputs + other.inputs,
            sorted(self.equations + other.equations),
        )


def transfer_groups(jaxpr: Any, layouts: Sequence[Layout]) -> list[TransferGroup]:
    """Returns the groups of a jaxpr in order; consecutive ones are joined up to `GROUP_SIZE`."""
    found: list[TransferGroup] = []
    for group in _smallest_groups(jaxpr, layouts):
        group = _in_chunks(group, jaxpr, layouts)
        if found and found[-1].size + group.size <= GROUP_SIZE:
            found[-1] += group
        else:
            found.append(group)
    return found


def variables_of(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands that are not literals."""
    return [v for v in operands if isinstance(v, core.Var)]


def _smallest_groups(jaxpr: Any, layouts: Sequence[Layout]) -> list[TransferGroup]:
    """Returns the smallest groups, in the order of the program."""
    group_of: dict[Any, int] = {}  # by variable
    groups: dict[int, TransferGroup] = {}
    members: dict[int, list[Any]] = {}
    for i, (var, layout) in enumerate(zip(jaxpr.invars, layouts, strict=True)):
        if _is_grouped(layout):
            group_of[var], members[i] = i, [var]
            decoded = _DECODED if _is_quantized(layout) else 1
            groups[i] = TransferGroup(decoded * layout.bytes_per_device, [i], [])
    for number, eqn in enumerate(jaxpr.eqns):
        known = {group_of[v] for v in variables_of(eqn.invars) if v in group_of}
        if not known:
            continue
        first, *others = sorted(known)
        for other in others:
            groups[first] += groups.pop(other)
            group_of.update(dict.fromkeys(members[other], first))
            members[first] += members.pop(other)
        groups[first].equations.append(number)
        group_of.update(dict.fromkeys(eqn.outvars, first))
        members[first] += eqn.outvars
    _add_inputs_of_one_group(list(groups.values()), jaxpr)
    return sorted(groups.values(), key=lambda group: group.equations)


def _add_inputs_of_one_group(groups: Sequence[TransferGroup], jaxpr: Any) -> None:
    """Adds equations, such as squares of gradients, to their only user: else all are alive."""
    owner: dict[int, TransferGroup | None] = {n: group for group in groups for n in group.equations}
    users: dict[Any, list[TransferGroup | None]] = {v: [None] for v in variables_of(jaxpr.outvars)}
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if number not in owner and eqn.primitive.name in _ELEMENTWISE and eqn.outvars[0].aval.shape:
            found = [group for v in eqn.outvars for group in users.get(v, [])]
            only = found[0] if found else None
            if only is not None and all(group is only for group in found):
                owner[number] = only
                only.equations.insert(0, number)
        for v in variables_of(eqn.invars):
            users.setdefault(v, []).append(owner.get(number))


def _in_chunks(group: TransferGroup, jaxpr: Any, layouts: Sequence[Layout]) -> TransferGroup:
    """Splits the group into the chunks that `GROUP_SIZE` requires, if its rows are independent."""
    shapes = {layouts[i].shape for i in group.inputs}
    if group.size <= GROUP_SIZE or len(shapes) > 1:
        return group
    of_group = [layouts[i] for i in group.inputs]
    if any(x.padding or any(tuple(x.spec)[:1]) for x in of_group):  # rows of several devices
        return group
    if any(jaxpr.eqns[number].primitive.name not in _ELEMENTWISE for number in group.equations):
        return group
    rows = shapes.pop()[0]
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and group.size <= n * GROUP_SIZE]
    return dataclasses.replace(group, chunks=min(fitting, default=rows))
