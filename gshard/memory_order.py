"""The order in which the dimensions of an array lie in memory, where XLA is not to choose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def as_it_came(x: jax.Array) -> jax.Array:
    """An array with its first dimension outermost in memory, as JAX hands it to a program.

    For what a loop reads and does not change. XLA's layout assignment lets such an array have the
    order that one use in the loop likes best, and copies all of it before the loop; with this the
    use turns what it reads. Keys of random numbers and vectors come back as they are.
    """
    if x.ndim < 2 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
