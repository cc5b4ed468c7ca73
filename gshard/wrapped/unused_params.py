"""Finds the parameters that a loss does not use, and models that it reads from outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from gshard._util.errors import GShardError, some, warn
from gshard._util.jaxpr import called
from gshard._util.pytree import flatten


def check_closure(loss_fn: Callable[..., Any], model: nnx.Module) -> None:
    """Warns of models that a loss reads from outside: once compiled, it sees their first values.

    Raises:
      GShardError: it reads the wrapped model itself from outside, which then has no gradient.
    """
    function: Any = loss_fn
    while hasattr(function, "loss_fn"):
        function = function.loss_fn
    found: dict[str, Any] = {"its self": getattr(function, "__self__", None)}
    try:
        variables = inspect.getclosurevars(inspect.unwrap(function))
        found.update({**variables.globals, **variables.nonlocals})
    except TypeError:  # no Python function
        pass
    read = {name: x for name, x in found.items() if isinstance(x, nnx.Module)}
    own = [name for name, x in read.items() if x is model]
    if own:
        raise GShardError(
            f"backward: the loss reads the model as {own[0]}, from outside, and not as its first "
            "argument: it would have no gradient. Use the model that the loss is called with."
        )
    if read:
        warn(
            f"backward: the loss reads {some(read)} from outside. It is compiled with the values "
            "of now; where they change, pass them in the batch (nnx.split(other), and nnx.merge in "
            "the loss)."
        )


def unreached(loss_fn: Callable[..., Any], model: nnx.Module, wrt: Any, batch: Any) -> list[str]:
    """Returns the paths of the parameters that `loss_fn(model, batch)` does not depend on.

    Args:
      loss_fn: the loss that `backward` was given.
      model: the abstract model, in logical shapes.
      wrt: the filter of the parameters.
      batch: the batch, a tree of arrays.
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
    """Returns which inputs of a jaxpr these outputs depend on, also through inner calls."""
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
