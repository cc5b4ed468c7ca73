"""Keeps the optimizer's state, and anything else, where a step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var

from gshard._util.jaxpr import INLINE_LATE, JIT, bind, body_of, evaluate


def keep_unless(updates: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new values where a step updates, else the old ones."""

    def chosen(x: Any, y: Any) -> jax.Array:
        # A constant may have no shape and no dtype. This takes a third of `jnp.where`'s time.
        if jnp.shape(x) == y.shape and getattr(x, "dtype", None) == y.dtype:
            return lax.select_n(updates, y, x)
        return jnp.where(updates, x, y)

    return jax.tree.map(chosen, new, old)


class SkippableUpdate:
    """A traced update that keeps the state where a step is skipped.

    Every new leaf is selected where it is computed, so that later equations read the selected one.
    Selected at the end, old and new state would both be alive, with no update in place.

    Args:
      update: `update(grads, state, params, *rest)` returns updates and a new state.
      args: `(updates, grads, state, params, *rest)`, arrays or abstract; `updates` is whether the
        step updates, or None for always.

    Attributes:
      jaxpr: maps the flat `args` to the flat updates and state.
      consts: its constants.
    """

    def __init__(self, update: Callable[..., tuple[Any, Any]], args: Sequence[Any]):
        def updated(updates: Any, *args: Any) -> tuple[Any, Any]:
            del updates  # an operand of the selections that are added
            return update(*args)

        jitted = jax.jit(updated, inline=INLINE_LATE)
        closed, shapes = jax.make_jaxpr(jitted, return_shape=True)(*args)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self._structure = jax.tree.structure(shapes)
        self._late: dict[int, int] = {}  # by result: the input to keep, if selected at the end
        if args[0] is None:
            return
        first, others = 1 + len(jax.tree.leaves(args[1])), len(jax.tree.leaves(shapes[0]))
        old = [*[None] * others, *range(first, first + len(jax.tree.leaves(args[2])))]
        self.jaxpr, self.consts, selected = _select_results(self.jaxpr, self.consts, old)
        pairs = enumerate(zip(old, selected, strict=True))
        self._late = {n: i for n, (i, done) in pairs if i is not None and not done}

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """Calls the equations as they were traced."""
        return evaluate(self.jaxpr, self.consts, flat, bind)

    def results(self, flat: Sequence[Any], found: Sequence[Any]) -> tuple[Any, Any]:
        """Returns updates and state of the arguments `flat`, for which `found` was computed."""
        found = list(found)
        for n, i in self._late.items():
            found[n] = keep_unless(flat[0], found[n], flat[i])
        return jax.tree.unflatten(self._structure, found)


def _select_results(
    jaxpr: Any, consts: Sequence[Any], old: Sequence[int | None]
) -> tuple[Any, Sequence[Any], list[bool]]:
    """Adds the selections to a jaxpr that calls one `jit`, or to one that was traced without.

    Input 0 says whether a step updates. `old` has for each result the input with its old value, or
    None. Also returns which results are selected; the others are inputs or constants.
    """
    eqn = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == JIT else None
    if eqn is None:
        return _selected(jaxpr, consts, jaxpr.invars[0], old)
    body, constants = body_of(eqn)
    place = {v: i for i, v in enumerate(eqn.invars) if isinstance(v, Var)}
    inside: dict[Any, int | None] = dict.fromkeys(eqn.outvars)
    for v, i in zip(jaxpr.outvars, old, strict=True):
        if i is not None and isinstance(v, Var) and v in inside:
            inside[v] = place[jaxpr.invars[i]]
    updates = body.invars[place[jaxpr.invars[0]]]
    body, constants, selected = _selected(body, constants, updates, list(inside.values()))
    found = dict(zip(eqn.outvars, zip(inside.values(), selected, strict=True), strict=True))
    params = {**eqn.params, "jaxpr": eqn.params["jaxpr"].replace(jaxpr=body, consts=constants)}
    done = [
        i is not None and isinstance(v, Var) and found.get(v) == (place[jaxpr.invars[i]], True)
        for v, i in zip(jaxpr.outvars, old, strict=True)
    ]
    return jaxpr.replace(eqns=[eqn.replace(params=params)]), consts, done


def _selected(
    jaxpr: Any, consts: Sequence[Any], updates: Var, old: Sequence[int | None]
) -> tuple[Any, list[Any], list[bool]]:
    """Returns the jaxpr with selections, its constants, and which of its results are selected."""
    pairs = zip(jaxpr.outvars, old, strict=True)
    due = {v: jaxpr.invars[i] for v, i in pairs if i is not None and isinstance(v, Var)}
    made = _Selections(updates)
    out = made.add(jaxpr, consts, {v: v for v in jaxpr.invars}, due)
    done = [
        i is not None and isinstance(v, Var) and made.selected.get(v) is jaxpr.invars[i]
        for v, i in zip(out, old, strict=True)
    ]
    jaxpr = jaxpr.replace(constvars=list(made.constants), eqns=made.eqns, outvars=out)
    return jaxpr, list(made.constants.values()), done


class _Selections:
    """The equations of a jaxpr and of the `jit`s in it, with selections between them.

    Nothing is traced again: the equations of an optimizer are many.

    Attributes:
      eqns: in order.
      constants: by variable.
      selected: the old value that a selected one replaces.
    """

    def __init__(self, updates: Var):
        self.eqns, self._updates = list[Any](), updates
        self.constants, self.selected = dict[Var, Any](), dict[Var, Var]()
        self._select = jax.make_jaxpr(lax.select_n)(True, 0.0, 0.0).jaxpr.eqns[0]

    def add(
        self, jaxpr: Any, consts: Sequence[Any], values: dict[Var, Any], due: dict[Var, Var]
    ) -> list[Any]:
        """Adds a jaxpr's equations; `due` has old values by new ones. Returns the results."""
        for v, const in zip(jaxpr.constvars, consts, strict=True):
            values[v] = Var(v.aval)
            self.constants[values[v]] = const

        def read(variables: Sequence[Any]) -> list[Any]:
            return [v if isinstance(v, Literal) else values[v] for v in variables]

        for eqn in jaxpr.eqns:
            ins = read(eqn.invars)
            if eqn.primitive.name == JIT:
                body, consts = body_of(eqn)
                pairs = zip(body.outvars, eqn.outvars, strict=True)
                wanted = {v: due[x] for v, x in pairs if x in due and isinstance(v, Var)}
                given = dict(zip(body.invars, ins, strict=True))
                values.update(zip(eqn.outvars, self.add(body, consts, given, wanted), strict=True))
                continue
            outs = [Var(v.aval) for v in eqn.outvars]
            self.eqns.append(eqn.replace(invars=ins, outvars=outs))
            for v, new in zip(eqn.outvars, outs, strict=True):
                values[v] = self._chosen(new, due[v]) if v in due else new
        return read(jaxpr.outvars)

    def _chosen(self, new: Any, old: Any) -> Var:
        """Adds a selection, unless later equations were traced for another shape or dtype."""
        before, after = (v.aval for v in (old, new))
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            return new
        chosen = Var(after.update(weak_type=before.weak_type and after.weak_type))
        invars = [self._updates, old, new]
        self.eqns.append(self._select.replace(invars=invars, outvars=[chosen]))
        self.selected[chosen] = old
        return chosen
