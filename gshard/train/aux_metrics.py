"""Auxiliary outputs as sums over micro-batches and calls, which are then reduced over devices.

A mean is kept multiplied by the weight of its examples, a `Weighted` as sum and weight, and a
`Reduced` as its value so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.sharding.precision import is_floating
from gshard.train.comm.collectives import reduce_scalar
from gshard.train.loss import Reduced, Reduction, Weighted, has_reduction

_SAME_AS: dict[str, Reduction] = {"any": "max", "all": "min"}
_COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def as_sums(aux: Any, weight: Any) -> Any:
    """Converts the aux of examples that weigh `weight` (float32 scalar) to sums that add up."""

    def total(x: Any) -> Any:
        if isinstance(x, Weighted):
            return Weighted(jnp.asarray(x.sum, jnp.float32), jnp.asarray(x.weight, jnp.float32))
        if not isinstance(x, Reduced):
            return _weighed(x, weight)
        value = jnp.asarray(x.value)
        if x.by == "mean":
            return _weighed(value, weight)
        if x.by == "sum":
            return Reduced(_wide(value), "sum")
        return Reduced(value, _SAME_AS.get(x.by, x.by))

    return jax.tree.map(total, aux, is_leaf=has_reduction)


def neutral_sums(sums: Any) -> Any:
    """Returns the neutral element: adding it to `sums` (concrete or abstract) changes nothing."""

    def empty(x: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x)
        return Reduced(jnp.full(x.value.shape, _neutral(x), x.value.dtype), x.by)

    return jax.tree.map(empty, sums, is_leaf=has_reduction)


def add_sums(sums: Any, more: Any) -> Any:
    """Combines two trees of sums of the same structure into one."""

    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(jnp.add, x, y)
        return Reduced(_COMBINE[x.by](x.value, y.value), x.by)

    return jax.tree.map(both, sums, more, is_leaf=has_reduction)


def reduce_sums(sums: Any, weight: Any, axes: Sequence[str]) -> Any:
    """Reduces sums over all devices, inside a `shard_map`; `weight` is that of the global batch."""

    def end(x: Any) -> jax.Array:
        if isinstance(x, Weighted):
            return reduce_scalar(x.sum, axes) / reduce_scalar(x.weight, axes)
        if isinstance(x, Reduced):
            return reduce_scalar(x.value, axes, x.by)
        return reduce_scalar(x, axes) / weight

    return jax.tree.map(end, sums, is_leaf=has_reduction)


def _weighed(x: Any, weight: Any) -> jax.Array:
    """Converts a mean to a sum; a mean of weight 0 counts as 0, even if it is NaN (0 / 0)."""
    return jnp.where(weight == 0, 0, x * weight)


def _wide(x: jax.Array) -> jax.Array:
    """Casts to the dtype of a sum: as `jnp.sum` for integers and booleans, at least float32."""
    if is_floating(x.dtype):
        return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return jnp.sum(x, axis=())


def _neutral(x: Reduced) -> Any:
    dtype = x.value.dtype
    if x.by == "sum":
        return 0
    if dtype == jnp.bool_:
        return x.by == "min"
    if is_floating(dtype):
        return jnp.inf if x.by == "min" else -jnp.inf
    return jnp.iinfo(dtype).max if x.by == "min" else jnp.iinfo(dtype).min
