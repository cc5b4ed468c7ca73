"""What `cast=True` converts, and how: an integer keeps its value, or it is an error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, warn

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
    # bfloat16 has the range of float32, but for its last thousandths.
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).max < 0.9 * jnp.finfo(x.dtype).max:
        too_large = int((np.isfinite(x) & ~np.isfinite(new)).sum())
        if too_large:
            warn(
                f"{name}: {too_large} of {x.size} numbers are too large for {np.dtype(dtype)} and "
                "have become infinite or NaN. Keep the dtype in which it is stored, or bfloat16."
            )
    return new
