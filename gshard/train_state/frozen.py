"""Frozen parameters, which have no gradient and no optimizer state.

Inside gshard the tree of trained parameters has an `optax.MaskedNode`, which has no leaves, in
place of each frozen one. Optax's own transformations accept such trees.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten, path_of

FROZEN = "frozen parameters"  # their key in `non_trainable`; no field can have this name


def take_out(params: Any, frozen: Set[str]) -> tuple[Any, dict[str, Any]]:
    """Splits parameters into the trained ones and, by path, the frozen ones."""
    if not frozen:
        return params, {}
    taken: dict[str, Any] = {}

    def take(keys: Any, x: Any) -> Any:
        path = path_of(keys)
        if path not in frozen:
            return x
        taken[path] = x
        return optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(take, params), taken


def put_back(trained: Any, frozen: dict[str, Any]) -> Any:
    """The inverse of `take_out`."""
    if not frozen:
        return trained
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: frozen[path_of(keys)] if _is_gap(x) else x, trained, is_leaf=_is_gap
    )


def trained_opt_state(tx: optax.GradientTransformation, trained: Any, opt_state: Any) -> Any:
    """Drops what belongs to frozen parameters from an optimizer state.

    Raises:
      GShardError: `opt_state` was not made by `tx` for these parameters.
    """
    wanted = jax.eval_shape(
        tx.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
    )
    paths, leaves, structure = flatten(wanted)
    have = dict(zip(*flatten(opt_state)[:2], strict=True))
    wrong = [
        path
        for path, x in zip(paths, leaves, strict=True)
        if path not in have or jnp.shape(have[path]) != x.shape
    ]
    if wrong:
        raise GShardError(
            f"the optimizer state has no {some(wrong)} for the parameters that are trained. Make "
            "it with this optimizer: tx.init(params)."
        )
    return jax.tree.unflatten(structure, [have[path] for path in paths])


class Frozen(optax.GradientTransformationExtraArgs):
    """An optimizer of all parameters that leaves those at `paths` unchanged.

    Attributes:
      tx: the optimizer of the other parameters.
      paths: paths of the frozen parameters.
    """

    tx: optax.GradientTransformation
    paths: Set[str]


def thawed(tx: optax.GradientTransformation, frozen: Set[str]) -> optax.GradientTransformation:
    """Returns the optimizer that `without_frozen` wrapped, for a state that freezes `frozen`.

    Raises:
      GShardError: the optimizer has no state for a parameter that is no longer frozen.
    """
    if not isinstance(tx, Frozen):
        return tx
    fresh = sorted(tx.paths - frozen)
    if fresh:
        raise GShardError(
            f"the optimizer of this state was made with {some(fresh)} frozen, and has no state for "
            "them. To train them from here, give it one: "
            "state.replace(tx=tx, opt_state=tx.init(state.params)) with your own tx; to keep them "
            "frozen, name them in frozen= again."
        )
    return tx.tx


def without_frozen(
    tx: optax.GradientTransformation, frozen: Set[str]
) -> optax.GradientTransformation:
    """Wraps `tx` to take all parameters and leave the frozen ones unchanged."""
    if not frozen:
        return tx
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return inner.init(take_out(params, frozen)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise GShardError("update(grads, opt_state) needs the parameters too: pass params.")
        trained, others = take_out(params, frozen)
        new, state = inner.update(take_out(updates, frozen)[0], state, trained, **extra)
        return put_back(new, no_change(others)), state

    made = Frozen(init, update)  # pyright: ignore[reportArgumentType]
    made.tx, made.paths = tx, frozen
    return made


def no_change(params: dict[str, Any]) -> dict[str, Any]:
    """Returns updates that change no bit of the parameters: -0.0 keeps the sign of a zero."""
    return {
        path: jnp.full_like(x, -0.0 if jnp.issubdtype(x.dtype, jnp.inexact) else 0)
        for path, x in params.items()
    }


def _is_gap(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
