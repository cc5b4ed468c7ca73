"""Pads arrays of JAX or NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def padded(x: Any, dim: int, size: int, xp: Any = jnp) -> Any:
    """Returns an array with zeros at the end of a dimension, so that it has this size."""
    if x.shape[dim] == size:
        return x
    return xp.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])
