"""Sums, means and norms over the whole sequence, of which each device has a slice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import dimension, shown
from gshard.sequence.collectives import size, total


def sum(x: Any, *, dim: int = 1, keepdims: bool = False, axis: str = "sequence") -> jax.Array:
    """The sum over the whole sequence: `jnp.sum(x, dim)`, with the slices of all devices.

    Args:
      x: an array with this device's slice of the sequence along `dim`: (batch, T/S, ...).
      dim: the dimension of the sequence.
      keepdims: keep that dimension, with size 1.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      The sum, the same on every device of the axis.

    Raises:
      GShardError: `x` has no such dimension.

    Example:
      >>> gshard.sequence.sum(jnp.ones((2, 4)))
      Array([4., 4.], dtype=float32)
    """
    x = jnp.asarray(x)
    _check(x, dim)
    local = jnp.sum(x, dim, keepdims=keepdims)
    return total(local, axis) if size(axis) > 1 else local


def mean(
    x: Any,
    *,
    where: Any = None,
    dim: int = 1,
    keepdims: bool = False,
    axis: str = "sequence",
) -> jax.Array:
    """The mean over the whole sequence, with the slices of all devices.

    Args:
      x: an array with this device's slice of the sequence along `dim`: (batch, T/S, ...).
      where: booleans, which tokens count; broadcast to the shape of `x`. Devices may have unequal
        numbers of them. The mean of no token is NaN, as in NumPy.
      dim: the dimension of the sequence.
      keepdims: keep that dimension, with size 1.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      The mean, the same on every device of the axis.

    Raises:
      GShardError: `x` has no such dimension, `where` is not boolean or does not broadcast to it.

    Example:
      >>> x = jnp.array([[1.0, 2.0, 9.0]])
      >>> gshard.sequence.mean(x, where=jnp.array([[True, True, False]]))
      Array([1.5], dtype=float32)
    """
    x = jnp.asarray(x)
    _check(x, dim)
    dtype = jnp.result_type(x, float)
    x = x.astype(jnp.promote_types(dtype, jnp.float32))
    count: Any = x.shape[dim] * size(axis)
    if where is not None:
        where = jnp.asarray(where)
        if where.dtype != bool:
            raise GShardError(
                f"where has dtype {where.dtype}: pass booleans, such as where > 0. A mean with "
                "weights is sum(x * weights) / sum(weights), of gshard.sequence.sum."
            )
        try:
            counted = jnp.broadcast_to(where, x.shape)
        except ValueError as error:
            raise GShardError(
                f"where has shape {np.shape(where)}, which does not broadcast to {x.shape}, the "
                "shape of x. Add dimensions of size 1, as in where[..., None]."
            ) from error
        count = sum(counted.astype(x.dtype), dim=dim, keepdims=keepdims, axis=axis)
        x = jnp.where(counted, x, 0)
    return (sum(x, dim=dim, keepdims=keepdims, axis=axis) / count).astype(dtype)


def norm(x: Any, *, dim: int = 1, keepdims: bool = False, axis: str = "sequence") -> jax.Array:
    """The Euclidean norm along the whole sequence: `jnp.linalg.norm(x, axis=dim)`.

    Args:
      x: an array with this device's slice of the sequence along `dim`: (batch, T/S, ...).
      dim: the dimension of the sequence.
      keepdims: keep that dimension, with size 1.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      The norm, the same on every device of the axis.

    Raises:
      GShardError: `x` has no such dimension.

    Example:
      >>> gshard.sequence.norm(jnp.array([[3.0, 4.0]]))
      Array([5.], dtype=float32)
    """
    x = jnp.asarray(x)
    x = x.astype(jnp.result_type(x, float))  # squares of integers would overflow
    return jnp.sqrt(sum(jnp.square(jnp.abs(x)), dim=dim, keepdims=keepdims, axis=axis))


def _check(x: jax.Array, dim: Any) -> None:
    if dimension(dim, x.ndim) is None:
        raise GShardError(
            f"dim={shown(dim)} is not a dimension of an array of shape {np.shape(x)}: pass the "
            "dimension of the sequence."
        )
