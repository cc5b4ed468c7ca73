"""What a user's own loop gives an optimizer beside the gradients, such as the loss for L-BFGS."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import jax

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
    parameters gets them as the user's state has them, with the frozen ones, and gradients that it
    returns are converted back, also within a tuple. Where the parameters are one bare array, other
    arrays may have its shape: then `grad=` alone is converted, and what functions get by position.
    """
    if not extra:
        return extra
    layouts = jax.tree.leaves(plan.params)
    logical = jax.tree.structure(plan.kind.trained(params)), [layout.shape for layout in layouts]
    users = _shapes(updates), _shapes(params)
    is_bare = jax.tree_util.treedef_is_leaf(logical[0])

    def given(own: Any) -> Any:
        if _shapes(own) != logical:
            return own
        own = map_leaves(lambda p, layout: cast(p, layout.dtype), own, plan.params)
        return plan.kind.with_frozen(plan.pin(own, plan.params), params)

    def seen(x: Any) -> Any:
        if isinstance(x, LocalGradients):
            refuse_local_gradients(x, ())
        if _shapes(x) in users:
            return logical_grads(plan.kind.trained(x), plan)
        if type(x) is tuple and not is_bare:
            return (*map(seen, x),)
        if type(x) is list and not is_bare:
            return [*map(seen, x)]
        return x

    def converted(name: str, x: Any) -> Any:
        if _shapes(x) in users:  # also parameters that can be called, such as those of Equinox
            return x if is_bare and name != "grad" else seen(x)
        if not callable(x) or isinstance(x, type):
            return seen(x)

        def called(*args: Any, **by_name: Any) -> Any:
            if not is_bare:
                by_name = {name: given(y) for name, y in by_name.items()}
            return seen(x(*map(given, args), **by_name))

        return _Converted(x, called)

    return {name: converted(name, x) for name, x in extra.items()}


class _Converted:
    """A user's function with another call; optax reads the names of its arguments."""

    def __init__(self, own: Any, called: Callable[..., Any]):
        update_wrapper(self, own, updated=())
        self._own, self._called = own, called

    def __call__(self, *args: Any, **by_name: Any) -> Any:
        return self._called(*args, **by_name)

    def __getattr__(self, name: str) -> Any:
        if "_own" not in self.__dict__:  # a copy, before it has any
            raise AttributeError(name)
        return getattr(self._own, name)


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    try:
        leaves, structure = jax.tree.flatten(tree)
    except (TypeError, ValueError):  # keys without an order
        return jax.tree.structure(0), [None]
    return structure, [getattr(x, "shape", None) for x in leaves]


def logical_grads(grads: Any, plan: Plan) -> Any:
    """Gradients, or what has their layouts, in logical shapes."""

    def logical(x: Any, layout: Layout) -> Any:
        return layout.unpad(layout.as_stored(x, "the gradients"))

    return map_leaves(logical, grads, plan.grads)
