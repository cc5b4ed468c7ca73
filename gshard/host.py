"""Whole values on the host: gathered leaf by leaf, padding cut off."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gshard.errors import GShardError
from gshard.fit import refuse_donated
from gshard.layout import DEVICE, Layout
from gshard.state import PARAMETERS, Parts, kind_of


def full_params(state: Any) -> Any:
    """The whole parameters, logical shapes, as NumPy arrays on every process.

    Gathered leaf by leaf: no device ever holds more than one whole leaf beside its parts. With a
    `Precision` these are the master copies.

    Args:
      state: of `shard_train_state`, at any level; for NNX the `(model, optimizer)` pair.

    Returns:
      A tree like the user's own parameters; for NNX an `nnx.State`, ready for
      `nnx.update(model, params)`.

    Raises:
      GShardError: for a state that `shard_train_state` did not make.
    """
    plan = getattr(kind_of(state).tx(state), "plan", None)
    if plan is None:
        raise GShardError(
            "full_params: this state has no plan, it did not come from gshard.shard_train_state. "
            "Its parameters are whole already."
        )
    parts, layouts = plan.kind.split(state), plan.layouts
    others = {name: tree for name, tree in parts.extras.items() if name in PARAMETERS}
    whole = Parts(
        to_host(*plan.precise(parts.params, parts.opt_state)),
        None,
        None,
        {name: to_host(tree, layouts.extras[name]) for name, tree in others.items()},
    )
    return plan.kind.params_of(whole, plan.template)


def to_host(tree: Any, layouts: Any) -> Any:
    """A tree of stored global arrays as NumPy arrays of logical shape (PRNG keys stay keys)."""
    leaves, structure = jax.tree.flatten(tree)
    refuse_donated(leaves)
    places = jax.tree.leaves(layouts)
    whole = [_leaf_to_host(x, place) for x, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(structure, whole)


def _leaf_to_host(x: jax.Array, layout: Layout) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.array(jax.random.key_data(x).addressable_data(0))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.is_fully_addressable:
        return layout.cut(np.array(x))
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))
    if layout.on_host:  # a gather is between devices
        x = jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
    return layout.cut(np.asarray(multihost_utils.process_allgather(x, tiled=True)))
