"""The order in which the dimensions of an array lie in memory, where XLA is not to choose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from gshard.sharding.mesh import Group

# On TPU a narrow matrix rests transposed, and is padded in any other order; on CPU no second order
# was seen. It is left out where it is not needed: `jax.export` refuses programs that have it.
_PLATFORMS = ("gpu",)


def keep_dimension_order(x: jax.Array, group: Group) -> jax.Array:
    """An array with its first dimension outermost in memory, as a program for GPU is handed it.

    For what a loop reads and does not change. XLA's layout assignment lets such an array have the
    order that one use in the loop likes best, and copies all of it before the loop; with this the
    use turns what it reads.

    Args:
      x: on one device of `group`.
      group: on other platforms the array stays as it is, and beside axes of the user's own, over
        which XLA:GPU would gather it for this. So do vectors, and keys of random numbers.
    """
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if group.platform not in _PLATFORMS or group.user or keys or x.ndim < 2:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
