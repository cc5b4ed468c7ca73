"""The state of an optimizer, kept as it is where a step does not update, without a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from gshard._util.jaxpr import JIT, bind, body_of


def keep_unless(updates: jax.Array, new: Any, old: Any) -> Any:
    """The new values where a step updates, else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(updates, x, y), new, old)


def guarded(
    update: Callable[[Any, Any, Any], tuple[Any, Any]], updates: jax.Array
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`update(grads, state, params)` of an optimizer whose state stays where `updates` is false.

    What it makes of the parameters is to be kept by the caller. Every new leaf of the state is
    chosen where it arises, so that what follows from it reads the one that is kept. Chosen at the
    end, both would be alive with the old one, and the state could not be changed in place.
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
    """Results of a jaxpr, those with an old value (not None) chosen, early where that can be."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    due = {v: x for v, x in zip(jaxpr.outvars, old, strict=True) if not isinstance(v, Literal)}
    chosen: dict[Any, Any] = {}  # the old value by variable

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        given, wanted = [read(v) for v in eqn.invars], [due.get(v) for v in eqn.outvars]
        # What follows was traced for the dtype of the new one.
        wanted = [
            x if x is not None and x.dtype == v.aval.dtype else None
            for v, x in zip(eqn.outvars, wanted, strict=True)
        ]
        if eqn.primitive.name == JIT:
            results = _choosing(*body_of(eqn), given, wanted, updates)
        else:
            with jax.named_scope(str(eqn.source_info.name_stack) or "update"):
                results = [
                    new if x is None else keep_unless(updates, new, x)
                    for new, x in zip(bind(eqn, given), wanted, strict=True)
                ]
        values.update(zip(eqn.outvars, results, strict=True))
        chosen.update((v, x) for v, x in zip(eqn.outvars, wanted, strict=True) if x is not None)
    return [
        read(v)
        if x is None or (not isinstance(v, Literal) and chosen.get(v) is x)
        else keep_unless(updates, read(v), x)
        for v, x in zip(jaxpr.outvars, old, strict=True)
    ]
