"""All-gathers and reduce-scatters between processes on CPU, which communicate through Gloo.

Gloo's reduce-scatter may return wrong sums, without an error: it overwrites a buffer that it still
sends from (https://github.com/jax-ml/jax/issues/40830). JAX makes a reduce-scatter of every
all-gather that it differentiates. All-to-alls are right, and send as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def uses_gloo() -> bool:
    """Whether collectives run through Gloo."""
    joined = jax.process_count() > 1 or jax.distributed.is_initialized()
    return joined and jax.default_backend() == "cpu"


def all_gather(x: jax.Array, axes: str | Sequence[str], dim: int, tiled: bool = True) -> jax.Array:
    """`jax.lax.all_gather` along `dim`, whose derivative is right over Gloo too."""
    if not uses_gloo():
        return lax.all_gather(x, axes, axis=dim, tiled=tiled)
    copies = jnp.broadcast_to(x, (_size(axes), *x.shape))
    found = jnp.moveaxis(lax.all_to_all(copies, axes, 0, 0, tiled=True), 0, dim)
    return lax.collapse(found, dim, dim + 2) if tiled else found


def reduce_scatter(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """A tiled `jax.lax.psum_scatter` along `dim`, which is right over Gloo too."""
    if not uses_gloo():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    size = _size(axes)
    parts = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return lax.all_to_all(parts, axes, dim, dim, tiled=True).sum(dim, dtype=x.dtype)


def _size(axes: str | Sequence[str]) -> int:
    return math.prod(map(lax.axis_size, [axes] if isinstance(axes, str) else axes))
