"""Pads and widens arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def padded(x: Any, dim: int, size: int, xp: Any = jnp) -> Any:
    """Returns an array with zeros at the end of a dimension, so that it has this size."""
    if x.shape[dim] == size:
        return x
    return xp.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])


def wide_dtype(*dtypes: Any) -> Any:
    """The dtype of sums of such arrays: float64 if one of them has it, else float32."""
    is_double = any(jnp.dtype(x) in (jnp.float64, jnp.complex128) for x in dtypes)
    return jnp.float64 if is_double else jnp.float32


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`, without the time that JAX takes to trace one that changes nothing."""
    same = x.dtype == dtype and not getattr(x, "weak_type", False)
    return x if same else x.astype(dtype)


def identity(x: jax.Array) -> jax.Array:
    """Returns `x`. It is one function, so that `jax.jit` compiles it once."""
    return x


def replicated_value(x: jax.Array) -> np.ndarray:
    """Copies a replicated array to the host, when each device of this process has computed it.

    A process must not end while one of its devices is in a collective: where the others have ended
    it waits for them, for minutes and without a word.
    """
    return np.asarray(jax.block_until_ready(x).addressable_data(0))


def is_key(x: Any) -> bool:
    """Whether this is a typed key of `jax.random`, an array of them, or the form of one."""
    dtype: Any = getattr(x, "dtype", None)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def at_least_float32(x: Any) -> jax.Array:
    """Returns an array in float32, or in float64 if it has that."""
    return jnp.asarray(x, wide_dtype(jnp.result_type(x)))
