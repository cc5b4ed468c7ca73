"""Which parameters a loss reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from gshard.equations import called
from gshard.tree import flatten


def unreached(loss_fn: Callable[..., Any], model: nnx.Module, wrt: Any, batch: Any) -> list[str]:
    """Paths of the parameters that the value of `loss_fn(model, batch)` does not depend on.

    Args:
      loss_fn: as given to `backward`.
      model: abstract, in logical shapes.
      wrt: filter of the parameters.
      batch: arrays.
    """
    graph, params, rest = nnx.split(model, wrt, ...)

    leaves, structure = jax.tree.flatten(rest)
    paths, abstract, tree = flatten(params)

    def traced(params: list[Any], others: list[Any]) -> Any:
        model = nnx.merge(
            graph,
            jax.tree.unflatten(tree, params),
            jax.tree.unflatten(structure, others),
            copy=True,
        )
        return loss_fn(model, batch)

    jaxpr = jax.make_jaxpr(traced)(abstract, leaves).jaxpr
    needed = _needed(jaxpr, [True] * len(jaxpr.outvars))
    return [path for path, yes in zip(paths, needed, strict=False) if not yes]


def _needed(jaxpr: Any, outputs: list[bool]) -> list[bool]:
    """Which inputs of a jaxpr those outputs depend on, seen through calls of functions."""
    live = {
        v for v, yes in zip(jaxpr.outvars, outputs, strict=True) if yes and isinstance(v, core.Var)
    }
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in live for v in eqn.outvars]
        if not any(wanted):
            continue
        inner = called(eqn)
        if inner and len(inner[0].invars) == len(eqn.invars):
            given = _needed(inner[0], wanted)
        else:
            given = [True] * len(eqn.invars)
        live |= {
            v for v, yes in zip(eqn.invars, given, strict=True) if yes and isinstance(v, core.Var)
        }
    return [v in live for v in jaxpr.invars]
