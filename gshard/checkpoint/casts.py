"""What `cast=True` converts, and how: an integer keeps its value, or it is an error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, warn
from gshard.sharding.precision import is_floating

CASTS = "cast=True converts floating dtypes into one another, and integer ones."


def can_cast(stored: Any, wanted: Any) -> bool:
    """Whether `cast=True` converts one dtype, or its name, into another."""
    if "key" in f"{stored}{wanted}":
        return False
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return any(jnp.issubdtype(stored, k) and jnp.issubdtype(wanted, k) for k in kinds)


def converted(name: str, x: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in this dtype. Floats that are too large for it become infinite, with a warning.

    Raises:
      GShardError: it holds an integer that the dtype does not have.
    """
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        new = x.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) and (new != x).any():
        raise GShardError(
            f"{name} holds integers that do not fit {dtype}. Keep the dtype in which it is stored."
        )
    if too_large(x, new):  # not how large: other shards have the same warning then
        warn(
            f"{name} has numbers that are too large for {np.dtype(dtype)}, which become infinite "
            "or NaN. Keep the dtype in which it is stored."
        )
    return new


def too_large(x: np.ndarray, new: np.ndarray) -> float:
    """Returns the largest number that is finite in `x` and not in a narrower dtype; 0 if none."""
    if not (is_floating(new.dtype) and is_floating(x.dtype)):
        return 0.0
    limit = float(jnp.finfo(new.dtype).max)
    if max(float(x.max(initial=0)), -float(x.min(initial=0))) <= limit:  # the usual case
        return 0.0
    lost = np.isfinite(x) & ~np.isfinite(new)
    return float(np.abs(x[lost]).max()) if lost.any() else 0.0
