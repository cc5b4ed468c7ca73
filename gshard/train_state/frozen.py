"""Parameters that the optimizer does not update: frozen ones, and the statistics of fp8 layers.

Frozen parameters have no gradient and no optimizer state. Inside gshard the tree of trained
parameters has an `optax.MaskedNode`, which has no leaves, in place of each frozen one. Optax's own
transformations accept such trees.

A model with fp8 layers has `params = {"params": ..., "_overwrite_with_gradient": ...}`. Flax's
`TrainState` gives its optimizer the first alone, and replaces the second by its gradient: layers
return new statistics as the gradient of the old ones (`flax.linen.fp8_ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten, path_of

# Their keys in `non_trainable`; no field can have such a name.
FROZEN, OVERWRITTEN = "frozen parameters", "overwritten parameters"
PARAMETERS = (FROZEN, OVERWRITTEN)


def all_params(trained: Any, non_trainable: Mapping[str, Any]) -> Any:
    """Rebuilds the user's parameter tree from the trained and the non-trainable parameters."""
    return join_overwritten(put_back(trained, non_trainable.get(FROZEN, {})), non_trainable)


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

    def is_gap(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    return jax.tree_util.tree_map_with_path(
        lambda keys, x: frozen.get(path_of(keys), x) if is_gap(x) else x, trained, is_leaf=is_gap
    )


def trained_opt_state(tx: optax.GradientTransformation, trained: Any, opt_state: Any) -> Any:
    """Drops what belongs to frozen parameters from an optimizer state, which `tx` has made."""
    paths, leaves, structure = flatten(jax.eval_shape(tx.init, trained))
    have = dict(zip(*flatten(opt_state)[:2], strict=True))
    pairs = zip(paths, leaves, strict=True)
    wrong = [path for path, x in pairs if path not in have or not _fits(have[path], x)]
    if wrong:
        raise GShardError(
            "the optimizer state does not fit the parameters that are trained. Missing, or of "
            f"another shape or kind of number: {some(wrong)}. Pass (params, tx): the state is then "
            "made of these parameters alone."
        )
    return jax.tree.unflatten(structure, [have[path] for path in paths])


def _fits(x: Any, wanted: jax.ShapeDtypeStruct) -> bool:
    """Whether it has the shape, and is a number of the kind: an integer may be a rounded float."""
    kinds = [jnp.issubdtype(dtype, jnp.inexact) for dtype in (jnp.result_type(x), wanted.dtype)]
    return jnp.shape(x) == wanted.shape and kinds[0] == kinds[1]


class Frozen(optax.GradientTransformationExtraArgs):
    """An optimizer of all parameters that leaves those at `paths` unchanged.

    Attributes:
      tx: the optimizer of the other parameters.
      paths: paths of the frozen parameters.
    """

    tx: optax.GradientTransformation
    paths: Set[str]


def thawed(tx: optax.GradientTransformation, frozen: Set[str]) -> optax.GradientTransformation:
    """Returns the optimizer that `without_frozen` wrapped, which has no state for frozen ones."""
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
    """Returns updates that change no bit of the parameters: -0.0 keeps the sign of a zero.

    They are in the memory of the parameters, which an offloaded state has on the host.
    """

    def zeros(x: Any) -> Any:
        found = jnp.full_like(x, -0.0 if jnp.issubdtype(x.dtype, jnp.inexact) else 0)
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(found, jax.memory.Space.Host) if on_host else found

    return {path: zeros(x) for path, x in params.items()}


def updated(params: Any) -> Any:
    """Returns the parameters that an optimizer updates; refuses what `TrainState` would drop."""
    if not isinstance(params, Mapping) or OVERWRITE_WITH_GRADIENT not in params:
        return params
    if set(params) != {"params", OVERWRITE_WITH_GRADIENT}:
        raise GShardError(
            f"the parameters have {OVERWRITE_WITH_GRADIENT!r} and {some(sorted(params))}. Flax's "
            "TrainState accepts only {'params': ..., '_overwrite_with_gradient': ...}: keep other "
            "collections in fields of their own."
        )
    return params["params"]


def overwritten(params: Any) -> dict[str, Any]:
    """Returns the parameters that their gradient replaces, as non-trainable state."""
    if updated(params) is params:
        return {}
    return {OVERWRITTEN: {OVERWRITE_WITH_GRADIENT: params[OVERWRITE_WITH_GRADIENT]}}


def join_overwritten(params: Any, non_trainable: Mapping[str, Any]) -> Any:
    """The inverse of `updated` and `overwritten`."""
    if OVERWRITTEN not in non_trainable:
        return params
    return {"params": params, **non_trainable[OVERWRITTEN]}
