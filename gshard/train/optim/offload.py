"""State that rests in the host's memory: through the device in groups, for one update.

An update is traced and split into groups (`host_groups`). A group is fetched when the one before it
is on its way back and the one before that is computed, and a large stack of layers goes in turns,
so that the device never holds much of the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from gshard._util.jaxpr import JIT, Environment, bind_in_scope, body_of, evaluate
from gshard._util.pytree import flatten, same_leaves
from gshard.sharding.layout import Layout

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan

Update = Callable[[Any, Any], tuple[Any, Any]]


def streamed(fun: Update, state: Any, params: Any, plan: Plan) -> tuple[Any, Any]:
    """`fun(state, params)`, computed on the device; the results go where the plan has them rest.

    Args:
      fun: gives a tree like the parameters, and the new state.
      state: of the optimizer, in storage.
      params: the trained parameters.
      plan: where everything lies.
    """
    if not plan.bytes_per_device["host"]:
        return fun(state, params)
    closed, shapes, groups = _trace(fun, state, params, plan)
    results = _evaluate(closed, groups, jax.tree.leaves((params, state)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def sizes_at_once(fun: Update, state: Any, params: Any, plan: Plan) -> tuple[int, ...]:
    """Bytes on one device that are fetched together, in the order in which `streamed` does."""
    groups = _trace(fun, state, params, plan)[2]
    return tuple(group.size // group.turns for group in groups for _ in range(group.turns))


def fetched(tree: Any, layouts: Any) -> Any:
    """A stored tree on the device."""
    return _moved(tree, layouts, lambda x, _: jax.device_put(x, jax.memory.Space.Device))


def at_rest(tree: Any, layouts: Any, plan: Plan) -> Any:
    """A stored tree in the memory where it rests."""
    return _moved(tree, layouts, lambda x, place: jax.device_put(x, plan.sharding(place)))


def _moved(tree: Any, layouts: Any, move: Callable[[Any, Layout], Any]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, jax.tree.leaves(layouts), strict=True)
    return jax.tree.unflatten(structure, [move(x, p) if p.on_host else x for x, p in pairs])


def _trace(fun: Update, state: Any, params: Any, plan: Plan) -> tuple[Any, Any, list[Group]]:
    """`fun` between the memories, as a jaxpr, the shapes of its results, and its groups.

    Inputs and results of the jaxpr are the parameters and then the state.
    """
    places = plan.layouts.opt_state
    same_leaves(state, flatten(places)[0], "the optimizer state is")
    same_leaves(params, flatten(plan.params)[0], "the parameters are")

    def through_device(params: Any, state: Any) -> tuple[Any, Any]:
        new, after = fun(fetched(state, places), fetched(params, plan.params))
        return at_rest(new, plan.params, plan), at_rest(after, places, plan)

    traced, shapes = jax.make_jaxpr(through_device, return_shape=True)(params, state)
    leaves = jax.tree.leaves((params, state))
    closed = jax.make_jaxpr(lambda args: _without_jit(traced.jaxpr, traced.consts, args))(leaves)
    layouts = jax.tree.leaves((plan.params, places))
    return closed, shapes, groups_of(closed.jaxpr, layouts)


def _without_jit(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr; traced, those of one without `jit`, which hides what goes where."""

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == JIT:
            return _without_jit(*body_of(eqn), values)
        return bind_in_scope(eqn, values)

    return evaluate(jaxpr, consts, args, run)


def _evaluate(closed: Any, groups: Sequence[Group], args: Sequence[Any]) -> list[Any]:
    """The program's results: first what belongs to no group, then one group after the other."""
    jaxpr = closed.jaxpr
    scope = Environment([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args])
    grouped = {number for group in groups for number in group.equations}
    for number, eqn in enumerate(jaxpr.eqns):
        if number not in grouped:
            scope.run(eqn)
    sent: list[Any] = []  # what the group before sends back
    done: list[list[Any]] = [[], []]  # what groups give
    for group in groups:
        inputs = [jaxpr.invars[i] for i in group.inputs]
        # Without this order the compiler fetches everything at once.
        waited, *_ = lax.optimization_barrier((scope.read(inputs), sent, done[-2]))
        scope.write(inputs, waited)
        equations = [jaxpr.eqns[number] for number in group.equations]
        made = {v for eqn in equations for v in eqn.outvars}
        places = [i for i, v in enumerate(jaxpr.outvars) if isinstance(v, core.Var) and v in made]
        if group.turns > 1:
            _run_in_turns(scope, equations, jaxpr, places, group)
        else:
            for eqn in equations:
                scope.run(eqn)
        done.append(scope.read([jaxpr.outvars[i] for i in places]))
        sent = [x for x in done[-1] if _on_host(x)]
    return scope.read(jaxpr.outvars)


def _run_in_turns(
    scope: Environment, equations: Sequence[Any], jaxpr: Any, places: Sequence[int], group: Group
) -> None:
    """Runs a group a part of the rows at a time; what rests on the host is changed in its place.

    `places` are those of its results, and of the inputs that they replace.
    """
    made = {v for eqn in equations for v in eqn.outvars}
    used = list({v: None for eqn in equations for v in variables(eqn.invars) if v not in made})
    results = [jaxpr.outvars[i] for i in places]
    replaced = [jaxpr.invars[i] for i in places]
    in_place = [
        _on_host(new) and new.aval == old.aval for new, old in zip(results, replaced, strict=True)
    ]
    rows = jaxpr.invars[group.inputs[0]].aval.shape[0] // group.turns

    def turn(i: Any, now: list[jax.Array]) -> list[jax.Array]:
        whole = Environment(used, scope.read(used))
        for old, x, same in zip(replaced, now, in_place, strict=True):
            if same:
                whole.write([old], [x])
        parts = [
            lax.dynamic_slice_in_dim(x, i * rows, rows) if jnp.ndim(x) else x
            for x in whole.read(used)
        ]
        part = Environment(used, parts)
        for eqn in equations:
            part.run(eqn)
        return [
            lax.dynamic_update_slice_in_dim(x, new, i * rows, 0)
            for x, new in zip(now, part.read(results), strict=True)
        ]

    start = [
        scope.read([old])[0] if same else _nothing(new)
        for old, new, same in zip(replaced, results, in_place, strict=True)
    ]
    scope.write(results, lax.fori_loop(0, group.turns, turn, start))


def _nothing(v: Any) -> jax.Array:
    """Zeros to write the results of a loop into."""
    zeros = jnp.zeros(v.aval.shape, v.aval.dtype)
    return jax.device_put(zeros, jax.memory.Space.Host) if _on_host(v) else zeros


def _on_host(x: Any) -> bool:
    return x.aval.memory_space == jax.memory.Space.Host


GROUP_SIZE = 2**24  # bytes on one device

# What is computed entry by entry, and so on a part of the rows as on all.
_ENTRYWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos device_put div eq erf "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sharding_constraint sign sin "
    "sqrt square stop_gradient sub tan tanh xor".split()
)


@dataclass(frozen=True)
class Group:
    """Equations that are computed with the same arrays of the host.

    Attributes:
      size: bytes of these arrays on one device.
      inputs: their places among the inputs.
      equations: their places in the program.
      turns: parts of the rows, along dimension 0, that are taken one after the other.
    """

    size: int
    inputs: list[int]
    equations: list[int]
    turns: int = 1

    def __add__(self, other: Group) -> Group:
        return Group(
            self.size + other.size,
            [*self.inputs, *other.inputs],
            sorted([*self.equations, *other.equations]),
        )


def groups_of(jaxpr: Any, layouts: Sequence[Layout]) -> list[Group]:
    """The groups of a program without `jit`, in its order, small neighbours packed together.

    Args:
      jaxpr: the program.
      layouts: of its inputs.
    """
    return _packed([_in_turns(group, jaxpr, layouts) for group in _apart(jaxpr, layouts)])


def variables(operands: Sequence[Any]) -> list[Any]:
    """Those operands that are no literals."""
    return [v for v in operands if isinstance(v, core.Var)]


def _apart(jaxpr: Any, layouts: Sequence[Layout]) -> list[Group]:
    """The smallest groups, in the order of the program."""
    group_of: dict[Any, int] = {}  # by variable
    groups: dict[int, Group] = {}
    members: dict[int, list[Any]] = {}
    for i, (var, layout) in enumerate(zip(jaxpr.invars, layouts, strict=True)):
        if layout.on_host:
            group_of[var], members[i] = i, [var]
            groups[i] = Group(layout.bytes_per_device, [i], [])
    for number, eqn in enumerate(jaxpr.eqns):
        known = {group_of[v] for v in variables(eqn.invars) if v in group_of}
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
    _take_in(list(groups.values()), jaxpr)
    return sorted(groups.values(), key=lambda group: group.equations)


def _take_in(groups: Sequence[Group], jaxpr: Any) -> None:
    """Adds to a group what it alone needs, such as squares of gradients: else they are all kept."""
    owner: dict[int, Group | None] = {n: group for group in groups for n in group.equations}
    users: dict[Any, list[Group | None]] = {v: [None] for v in variables(jaxpr.outvars)}
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if number not in owner and eqn.primitive.name in _ENTRYWISE and eqn.outvars[0].aval.shape:
            found = [group for v in eqn.outvars for group in users.get(v, [])]
            only = found[0] if found else None
            if only is not None and all(group is only for group in found):
                owner[number] = only
                only.equations.insert(0, number)
        for v in variables(eqn.invars):
            users.setdefault(v, []).append(owner.get(number))


def _in_turns(group: Group, jaxpr: Any, layouts: Sequence[Layout]) -> Group:
    """The group in as many turns as `GROUP_SIZE` asks for, where its rows are independent."""
    shapes = {layouts[i].shape for i in group.inputs}
    if group.size <= GROUP_SIZE or len(shapes) > 1:
        return group
    places = [layouts[i] for i in group.inputs]
    if any(x.dim == 0 or x.padding or (x.model_axes and x.model_axes[0]) for x in places):
        return group
    if any(jaxpr.eqns[number].primitive.name not in _ENTRYWISE for number in group.equations):
        return group
    rows = shapes.pop()[0]
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and group.size <= n * GROUP_SIZE]
    return dataclasses.replace(group, turns=min(fitting, default=rows))


def _packed(groups: Sequence[Group]) -> list[Group]:
    """Neighbouring groups together, up to `GROUP_SIZE`."""
    packed: list[Group] = []
    for group in groups:
        if packed and packed[-1].size + group.size <= GROUP_SIZE:
            packed[-1] += group
        else:
            packed.append(group)
    return packed
