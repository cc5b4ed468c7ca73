"""An update that keeps the old values where a step does not update, such as after a NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from gshard._util.jaxpr import JIT, bind, body_of, evaluate, in_scope


def keep_unless(updates: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new values where a step updates, else the old ones."""

    def chosen(x: Any, y: Any) -> jax.Array:
        # A constant may have no shape and no dtype. This takes a third of `jnp.where`'s time.
        if jnp.shape(x) == y.shape and getattr(x, "dtype", None) == y.dtype:
            return lax.select_n(updates, y, x)
        return jnp.where(updates, x, y)

    return jax.tree.map(chosen, new, old)


def skip_state_where(
    update: Callable[[Any, Any, Any], tuple[Any, Any]], updates: jax.Array
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Wraps `update(grads, state, params)` to keep the state where `updates` is false.

    Every new leaf is selected where it is computed, so that later equations read the selected one.
    Selected at the end, old and new state would both be alive, with no update in place.
    """

    def kept(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        args = (grads, state, params)
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
        old = [None] * len(jax.tree.leaves(shapes[0])) + jax.tree.leaves(state)
        results = _choosing(closed.jaxpr, closed.consts, jax.tree.leaves(args), old, updates)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return kept


def _choosing(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], old: Sequence[Any], updates: jax.Array
) -> list[Any]:
    """Evaluates a jaxpr; results with an old value (not None) keep it where `updates` is false."""
    due = {v: x for v, x in zip(jaxpr.outvars, old, strict=True) if not isinstance(v, Literal)}
    chosen: dict[Any, Any] = {}  # the old value by variable

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        # Later equations were traced for the dtype of the new value.
        wanted = {v: x for v in eqn.outvars if (x := due.get(v)) is not None}
        wanted = {v: x for v, x in wanted.items() if x.dtype == v.aval.dtype}
        chosen.update(wanted)
        if eqn.primitive.name == JIT:
            return _choosing(*body_of(eqn), values, [wanted.get(v) for v in eqn.outvars], updates)
        with in_scope(eqn):
            return [
                keep_unless(updates, new, wanted[v]) if v in wanted else new
                for v, new in zip(eqn.outvars, bind(eqn, values), strict=True)
            ]

    return [
        new
        if x is None or (not isinstance(v, Literal) and chosen.get(v) is x)
        else keep_unless(updates, new, x)
        for v, x, new in zip(jaxpr.outvars, old, evaluate(jaxpr, consts, inputs, run), strict=True)
    ]
