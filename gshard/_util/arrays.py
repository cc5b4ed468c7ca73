"""Pads and widens arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def padded(x: Any, dim: int, size: int, xp: Any = jnp) -> Any:
    """Returns an array with zeros at the end of a dimension, so that it has this size."""
    if x.shape[dim] == size:
        return x
    return xp.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])


def at_least_float32(x: Any) -> jax.Array:
    """Returns an array in float32, or in its own dtype if that is float64."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
