"""What a user's own loop gives an optimizer beside the gradients, such as the loss for L-BFGS."""

from __future__ import annotations

from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arrays import cast
from gshard._util.pytree import map_leaves
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.gradients import LocalGradients, refuse_local_gradients


def as_optimizers_see(
    extra: dict[str, Any], updates: Any, params: Any, plan: Plan
) -> dict[str, Any]:
    """Converts what a user gives an optimizer beside the updates, such as `grad=` and `value_fn=`.

    An optimizer sees logical shapes, master copies, and no frozen parameters. A function of
    parameters gets them as the user's state has them, with the frozen ones, and what it returns is
    converted back.
    """
    if not extra:
        return extra
    layouts = jax.tree.leaves(plan.params)
    logical = jax.tree.structure(plan.kind.trained(params)), [layout.shape for layout in layouts]
    users = _shapes(updates), _shapes(params)

    def given(own: Any) -> Any:
        if callable(own) or _shapes(own) != logical:
            return own
        own = map_leaves(lambda p, layout: cast(p, layout.dtype), own, plan.params)
        return plan.kind.with_frozen(plan.pin(own, plan.params), params)

    def seen(x: Any) -> Any:
        if isinstance(x, LocalGradients):
            refuse_local_gradients(x)
        return logical_grads(plan.kind.trained(x), plan) if _shapes(x) in users else x

    def converted(x: Any) -> Any:
        if not callable(x) or isinstance(x, type):
            return seen(x)

        @wraps(x)  # optax reads the names of its arguments
        def called(*args: Any, **by_name: Any) -> Any:
            return seen(x(*map(given, args), **{name: given(y) for name, y in by_name.items()}))

        return called

    return {name: converted(x) for name, x in extra.items()}


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    try:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [*map(jnp.shape, leaves)]
    except (TypeError, ValueError):  # keys without an order, texts
        return jax.tree.structure(0), [None]


def logical_grads(grads: Any, plan: Plan) -> Any:
    """Gradients, or what has their layouts, in logical shapes."""

    def logical(x: Any, layout: Layout) -> Any:
        return layout.unpad(layout.as_stored(x, "the gradients"))

    return map_leaves(logical, grads, plan.grads)
