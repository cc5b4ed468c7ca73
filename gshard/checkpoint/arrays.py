"""A train state as arrays by path, and back: the same paths at every level and on every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AbstractMesh, NamedSharding

from gshard._util.errors import GShardError
from gshard._util.pytree import check_unique, flatten
from gshard.checkpoint.matching import LeafInfo, check_fit, differing, one_to_one, source_of
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan, check_state
from gshard.sharding.validate import refuse_donated
from gshard.train.local_gradients import LocalGradients
from gshard.train.shard_train_state import shard_leaf
from gshard.train_state import Components

Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]]


@runtime_checkable
class KeepsGradients(Protocol):
    """A model that keeps gradients beside its state, as a wrapped one does."""

    def _gshard_refuse_waiting(self) -> None:
        """Raises a `GShardError` where some wait to be reduced."""


def split_like(like: Any, call: str) -> tuple[Any, Plan]:
    """The state and the plan to restore into.

    Args:
      like: what `shard_train_state` returned, concrete or abstract; the state alone will do.
      call: for messages.

    Raises:
      GShardError: it is none of these, or its mesh has no devices.
    """
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], Plan):
        state, plan = like
        check_state(state, plan, call)
    elif isinstance(like, Plan):
        state, plan = like.abstract_state(), like
    elif like is None:
        raise GShardError(
            f"{call} was given no like=: pass the state that gshard.shard_train_state returned, or "
            "(abstract state, plan), so that arrays are read to where they will lie."
        )
    else:
        state, plan = like, plan_of(like, call)
    refuse_traced(plan.kind.split(state), call)
    if isinstance(plan.mesh, AbstractMesh):
        raise GShardError(f"{call}: the plan has an abstract mesh: it has no devices to read to.")
    return state, plan


def refuse_traced(parts: Components, call: str) -> None:
    """Raises a `GShardError` inside `jit`, where there are no values."""
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(parts)):
        raise GShardError(f"{call}: inside jit arrays have no values. Call it outside.")


def arrays_of(state: Any, plan: Plan) -> tuple[dict[str, jax.Array], dict[str, LeafInfo]]:
    """A state's arrays as stored, by path, without empty ones, and what all of them are.

    Raises:
      GShardError: arrays were given away, or gradients wait to be reduced.
    """
    for owner in state if isinstance(state, tuple) else ():
        if isinstance(owner, KeepsGradients):
            owner._gshard_refuse_waiting()
    parts = plan.kind.split(state)
    refuse_traced(parts, "save")
    waiting = [x for x in jax.tree.leaves(parts, is_leaf=_unreduced) if _unreduced(x)]
    if waiting:
        raise GShardError(
            "save: the state holds LocalGradients, which differ on every device. End them "
            "with gshard.reduce_gradients(acc, plan) and update before you save."
        )
    paths, leaves, _ = flatten(parts)
    check_unique(paths, "arrays of the state")
    refuse_donated(leaves)
    described = layouts_of(plan)
    if paths != list(described):
        raise GShardError(
            "save: the state is not the one that its plan was made for: "
            + "; ".join(differing(dict.fromkeys(described), dict.fromkeys(paths)))
        )
    known = {path: LeafInfo(x.shape, str(x.dtype)) for path, x in described.items()}
    arrays = {p: _data(x) for p, x in zip(paths, leaves, strict=True) if np.size(x)}
    return arrays, known


def layouts_of(plan: Plan) -> dict[str, Layout]:
    """The layouts of all parts of a state, by path."""
    paths, layouts, _ = flatten(plan.layouts)
    return dict(zip(paths, layouts, strict=True))


def parts_of(
    read: Read,
    stored: Mapping[str, LeafInfo],
    plan: Plan,
    cast: bool,
    fresh: Mapping[str, Any] = MappingProxyType({}),
) -> Components:
    """The arrays of a checkpoint as parts of a state.

    Args:
      read: gives arrays by path, each as the abstract one says.
      stored: what the checkpoint holds.
      plan: where the arrays are to lie.
      cast: whether another dtype is converted.
      fresh: values by path of what the checkpoint need not hold.

    Raises:
      GShardError: paths, shapes or dtypes that differ, each by its name.
    """
    layouts = layouts_of(plan)
    new = {path: fresh[path] for path in layouts if path in fresh and path not in stored}
    sources = {path: source_of(path, x, stored) for path, x in layouts.items() if path not in new}
    check_fit(stored, layouts, sources, cast)
    arrays = {path: shard_leaf(x, layouts[path], plan) for path, x in new.items()}
    for paths in one_to_one(sources):
        found = read({sources[p]: _abstract(layouts[p], plan) for p in paths if layouts[p].size})
        arrays |= {p: found[sources[p]] for p in paths if layouts[p].size}
    leaves = [_as_stored(arrays.get(path), x, plan) for path, x in layouts.items()]
    return jax.tree.unflatten(jax.tree.structure(plan.layouts), leaves)


def with_parts(parts: Components, state: Any, plan: Plan) -> Any:
    """A state like `state` with these arrays; a concrete NNX pair is changed in place."""
    own = plan.kind.split(state)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(own))
    if abstract or getattr(plan.kind.tx(state), "plan", None) is not plan:
        parts = dataclasses.replace(parts, static=plan.kind.split(plan.template).static)
        return plan.kind.merge(parts, state, plan.optimizer)
    new = plan.kind.update(state, dataclasses.replace(parts, static=own.static))
    return state if new is None else new


def _abstract(layout: Layout, plan: Plan) -> jax.ShapeDtypeStruct:
    """How a leaf is read; keys are read as their data."""
    if not _is_key(layout.dtype):
        return plan.abstract(layout)
    data, _ = _data_of_keys(layout)
    whole = NamedSharding(plan.mesh, jax.P())
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=whole)


def _as_stored(x: Any, layout: Layout, plan: Plan) -> jax.Array:
    if x is None:  # no elements: nothing was written
        empty = jnp.zeros(layout.stored_shape, layout.dtype)
        return jax.device_put(empty, plan.sharding(layout))
    if _is_key(layout.dtype):
        return jax.random.wrap_key_data(x, impl=_data_of_keys(layout)[1])
    return x


def _data_of_keys(layout: Layout) -> tuple[jax.ShapeDtypeStruct, Any]:
    """What keys are written as, abstract, and the generator that they are of."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(layout.shape, layout.dtype))
    return data, found[0]


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x.dtype) else x


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _unreduced(x: Any) -> bool:
    return isinstance(x, LocalGradients)
