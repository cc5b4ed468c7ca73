"""Full arrays on the host: gathered one by one, without padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gshard._util.activity import doing, meet
from gshard._util.arrays import identity, is_key, replicated_value
from gshard._util.errors import GShardError
from gshard._util.pytree import check_fits, map_leaves
from gshard._util.tracebacks import short_traceback
from gshard.sharding.layout import DEVICE, Layout
from gshard.sharding.validate import refuse_abstract, refuse_donated, refuse_traced
from gshard.train_state import Components, kind_of


@short_traceback
def full_params(state: Any) -> Any:
    """Gathers the full parameters as NumPy arrays of logical shape, on every process.

    They are gathered one by one, so a device never holds more than one full array in addition to
    its shards. With a `Precision` the result is the master copies.

    Args:
      state: a train state from `shard_train_state`, at any level; for NNX the `(model, optimizer)`
        pair. Over several processes every process must call this.

    Returns:
      A tree like the user's own parameters, with the frozen ones; for NNX an `nnx.State` of every
      `nnx.Param`, trained or not, ready for `nnx.update(model, params)`.

    Raises:
      GShardError: the state did not come from `shard_train_state`.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", min_shard_size=0)
      >>> full = gshard.full_params(state)
      >>> type(full["w"]).__name__, full["w"].shape
      ('ndarray', (64, 32))
    """
    plan = plan_of(state, "full_params")
    parts, layouts = plan.kind.split(state), plan.layouts
    params = full_on_host(*plan.master_params(parts.params, parts.opt_state))
    untrained = plan.kind.untrained(plan.template)
    others = {
        name: full_on_host(tree, layouts.non_trainable[name])
        for name, tree in parts.non_trainable.items()
        if name in untrained
    }
    return plan.kind.params_of(Components(params, None, None, others), plan.template)


def plan_of(state: Any, call: str) -> Any:
    """Returns the plan of a state of `shard_train_state`; `call` is the user's, for messages."""
    try:
        plan = getattr(kind_of(state).tx(state), "plan", None)
    except GShardError as error:
        raise GShardError(
            f"{call}: state is a {type(state).__name__}, not a state of gshard. Pass the state "
            "that gshard.shard_train_state or a step returned, not its params or the unsharded "
            "state; with NNX the pair (model, optimizer)."
        ) from error
    if plan is None:
        raise GShardError(
            f"{call}: this state has no plan: it did not come from gshard.shard_train_state. Call "
            "that first, even for one device: "
            'shard_train_state(state, make_mesh(devices=jax.devices()[:1]), "dp").'
        )
    return plan


def full_on_host(tree: Any, layouts: Any) -> Any:
    """Gathers a tree of stored arrays as NumPy arrays of logical shape (PRNG keys stay keys)."""
    refuse_abstract(jax.tree.leaves(tree))
    refuse_donated(jax.tree.leaves(tree))
    refuse_traced(jax.tree.leaves(tree), "full_params, or what gathers as it does,")
    return map_leaves(_leaf_to_host, tree, layouts)


def _leaf_to_host(x: jax.Array, layout: Layout) -> Any:
    if is_key(x):
        data = jnp.array(replicated_value(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if np.shape(x) not in (layout.stored_shape, layout.shape):
        raise GShardError(
            f"{layout.path or 'the step number'} has shape {np.shape(x)}; the plan has "
            f"{layout.shape} (stored as {layout.stored_shape}). Pass a state of this plan: what "
            "its gshard.shard_train_state or one of its steps returned."
        )
    return layout.unpad(np.array(stored_on_host(x, layout)))


def stored_on_host(x: Any, layout: Layout) -> np.ndarray:
    """Gathers one array on the host, in its storage shape. The result must not be modified.

    Over several processes every process calls this and gets the value. The result may share memory
    with `x`; where it does not, no other reference keeps it alive.
    """
    if not isinstance(x, jax.Array):
        check_fits(x, layout.dtype, layout.path or "the step number")
        return np.asarray(x, layout.dtype)
    if x.is_fully_addressable:
        return _assemble([s for s in x.addressable_shards if s.replica_id == 0], x)
    if x.is_fully_replicated:
        return replicated_value(x)
    if layout.on_host:  # an all-gather needs device memory
        x = jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
    with doing("a gather of full arrays, such as full_params", waits=True):
        meet((device.process_index for device in x.sharding.device_set), "a gather of full arrays")
        sharding: Any = x.sharding
        replicated = NamedSharding(sharding.mesh, jax.P())
        with jax.disable_jit(False):  # else the result is `x` itself
            return replicated_value(jax.jit(identity, out_shardings=replicated)(x))


def _assemble(shards: list[Any], x: jax.Array) -> np.ndarray:
    """Copies shards into one array one at a time; `np.asarray(x)` would keep a second copy."""
    if len(shards) == 1:
        return _on_host(shards[0].data)
    full = np.empty(x.shape, x.dtype)
    for shard in shards:
        full[shard.index] = _on_host(shard.data)
    return full


def _on_host(x: jax.Array) -> np.ndarray:
    """Copies one device's array through a temporary array, since JAX caches the host copy in it."""
    with jax.transfer_guard_device_to_host("allow"):  # whoever calls this asks for it
        return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]))
