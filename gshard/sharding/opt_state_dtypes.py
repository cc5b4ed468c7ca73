"""The dtypes of an optimizer's state, which an optimizer chooses by those of the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gshard._util.arrays import wide_dtype
from gshard._util.pytree import flatten, path_of
from gshard.sharding.precision import is_floating


def as_initialized(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """Returns an abstract optimizer state in the dtypes that `tx` gives it for these parameters."""
    paths, leaves, _ = flatten(jax.eval_shape(tx.init, _abstract(params)))
    dtypes = {path: x.dtype for path, x in zip(paths, leaves, strict=True)}
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: _in_dtype(x, dtypes.get(path_of(keys), x.dtype)), opt_state
    )


def as_updated(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """Returns an abstract optimizer state in the dtypes that it has after an update.

    With a float32 parameter in the tree, `optax.inject_hyperparams` turns bfloat16 moments into
    float32 in the first update. Plain JAX then compiles again; a plan must know it beforehand.
    """
    own = _abstract(params)
    floats = {x.dtype for x in jax.tree.leaves((own, opt_state)) if is_floating(x.dtype)}
    if {*floats, jnp.result_type(float)} == {jnp.dtype(jnp.float32)}:
        return opt_state  # nothing is promoted
    update = optax.with_extra_args_support(tx).update
    value = jax.ShapeDtypeStruct((), wide_dtype(*floats))
    try:
        after = jax.eval_shape(lambda s, g, v: update(g, s, g, value=v)[1], opt_state, own, value)
    except Exception:  # the user's own code, which may need other arguments
        return opt_state
    (paths, leaves, structure), found = flatten(opt_state), flatten(after)
    if found[0] != paths:
        return opt_state  # the step says what is wrong with it
    wider = [
        is_floating(x.dtype) and y.dtype.itemsize > x.dtype.itemsize
        for x, y in zip(leaves, found[1], strict=True)
    ]
    if not any(wider):
        return opt_state
    columns = zip(leaves, found[1], wider, strict=True)
    new = (_in_dtype(x, y.dtype) if is_wider else x for x, y, is_wider in columns)
    return as_updated(tx, params, structure.unflatten(new))  # which may make others wider too


def _abstract(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _in_dtype(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))
