"""Whole values on the host: gathered leaf by leaf, padding cut off."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gshard._util.errors import GShardError
from gshard.sharding.layout import DEVICE, Layout
from gshard.sharding.validate import refuse_donated
from gshard.train_state import PARAMETERS, Components, kind_of


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
    plan = plan_of(state, "full_params")
    parts, layouts = plan.kind.split(state), plan.layouts
    others = {name: tree for name, tree in parts.non_trainable.items() if name in PARAMETERS}
    whole = Components(
        to_host(*plan.master_params(parts.params, parts.opt_state)),
        None,
        None,
        {name: to_host(tree, layouts.non_trainable[name]) for name, tree in others.items()},
    )
    return plan.kind.params_of(whole, plan.template)


def plan_of(state: Any, call: str) -> Any:
    """The plan of a divided state.

    Raises:
      GShardError: `shard_train_state` did not make this state; `call` begins the message.
    """
    try:
        plan = getattr(kind_of(state).tx(state), "plan", None)
    except GShardError as error:
        raise GShardError(f"{call}: {error}") from error
    if plan is None:
        raise GShardError(
            f"{call}: this state has no plan, it did not come from gshard.shard_train_state. "
            "Its parameters are whole already. On one device too, a plan is made by "
            'shard_train_state(state, make_mesh(devices=jax.devices()[:1]), "dp").'
        )
    return plan


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
    return layout.unpad(np.array(stored_on_host(x, layout)))


def stored_on_host(x: Any, layout: Layout) -> np.ndarray:
    """One array of numbers whole on the host, of the shape in storage; not to be written into.

    Over several processes every one calls it, and has the value. It may share its memory with `x`;
    where it does not, nothing but the result holds it.
    """
    if not isinstance(x, jax.Array):
        return np.asarray(x, layout.dtype)
    if x.is_fully_addressable:
        return _assembled([s for s in x.addressable_shards if s.replica_id == 0], x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    if layout.on_host:  # a gather is between devices
        x = jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _assembled(parts: list[Any], x: jax.Array) -> np.ndarray:
    """The value of `x` from its shards, one at a time: `np.asarray(x)` would hold all beside it."""
    if len(parts) == 1:
        return _on_host(parts[0].data)
    whole = np.empty(x.shape, x.dtype)
    for part in parts:
        whole[part.index] = _on_host(part.data)
    return whole


def _on_host(x: jax.Array) -> np.ndarray:
    """One device's array; by way of an object that goes, since JAX keeps what the host has seen."""
    return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]))
