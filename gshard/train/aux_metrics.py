"""Auxiliary outputs in a form that adds up over micro-batches and calls, and its end over devices.

A mean is carried times the weight of its rows, a `Weighted` as sum and weight, a `Reduced` as its
value so far.
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
    """What adds up, of the aux of rows that weigh `weight` (float32 scalar)."""

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
    """What changes nothing where it is added to `sums` (arrays, concrete or abstract)."""

    def empty(x: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x)
        return Reduced(jnp.full(x.value.shape, _neutral(x), x.value.dtype), x.by)

    return jax.tree.map(empty, sums, is_leaf=has_reduction)


def add_sums(sums: Any, more: Any) -> Any:
    """Two of the same tree as one."""

    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(jnp.add, x, y)
        return Reduced(_COMBINE[x.by](x.value, y.value), x.by)

    return jax.tree.map(both, sums, more, is_leaf=has_reduction)


def reduce_sums(sums: Any, weight: Any, axes: Sequence[str]) -> Any:
    """The aux of all devices; `weight` is that of all rows. Runs inside a `shard_map`."""

    def end(x: Any) -> jax.Array:
        if isinstance(x, Weighted):
            return reduce_scalar(x.sum, axes) / reduce_scalar(x.weight, axes)
        if isinstance(x, Reduced):
            return reduce_scalar(x.value, axes, x.by)
        return reduce_scalar(x, axes) / weight

    return jax.tree.map(end, sums, is_leaf=has_reduction)


def _weighed(x: Any, weight: Any) -> jax.Array:
    """A mean as a sum; rows of no weight do not count, whatever their mean is (0 / 0)."""
    return jnp.where(weight == 0, 0, x * weight)


def _wide(x: jax.Array) -> jax.Array:
    """In the dtype of a sum: integers and booleans as `jnp.sum` has them, small floats float32."""
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
