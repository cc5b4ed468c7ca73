"""The update of the user's own optimizer: what it is given, and what it may give back, in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from gshard._util.errors import GShardError
from gshard._util.pytree import same_leaves

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


def user_update(
    tx: optax.GradientTransformation, plan: Plan, extra: dict[str, Any]
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`tx.update` of gradients, state and parameters, with those of `extra` that it takes."""
    accepted = _accepted(tx, extra)

    def update(grads: Any, inner: Any, own: Any) -> tuple[Any, Any]:
        try:
            updates, inner = tx.update(grads, inner, own, **accepted)
        except (TypeError, ValueError) as error:
            _explain(error)
            raise
        _check_results(updates, inner, plan)
        return updates, inner

    return update


def _accepted(tx: optax.GradientTransformation, extra: dict[str, Any]) -> dict[str, Any]:
    """Those extra arguments that the update takes; optax's own mostly take any."""
    parameters = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return extra
    return {name: value for name, value in extra.items() if name in {p.name for p in parameters}}


def _check_results(updates: Any, inner: Any, plan: Plan) -> None:
    """Refuses an optimizer's results that are not the trees, or not of the shapes, of the plan."""
    for tree, layouts, name in (
        (updates, plan.grads, "the updates that the optimizer returns are"),
        (inner, plan.opt_state, "the state that the optimizer returns is"),
    ):
        places = jax.tree.leaves(layouts)
        same_leaves(tree, (place.path for place in places), name)
        for x, place in zip(jax.tree.leaves(tree), places, strict=True):
            if jnp.shape(x) != place.shape:
                raise GShardError(
                    f"{name} not of the plan's shapes: {place.path} has {jnp.shape(x)}, not "
                    f"{place.shape}. Return an array of its shape for every leaf."
                )


def _explain(error: Exception) -> None:
    """Puts an optimizer's demand for more than a train step has in gshard's words."""
    said = str(error)
    if "batch dimension" in said:
        raise GShardError(
            "the optimizer wants one gradient for each example, and a train step has their mean: "
            f"{said}"
        ) from error
    if "required keyword-only argument" in said or "must be provided" in said:
        raise GShardError(
            f"the optimizer needs more than gradients and parameters: {said}. make_train_step "
            "gives it value= (the loss); pass what else it needs in your own loop: "
            "state.tx.update(grads, state.opt_state, state.params, ...)."
        ) from error
