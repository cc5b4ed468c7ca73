"""Makes state that the loss returns, and that differs by device, the same on every device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard.sharding.group import Group
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.collectives import extreme, group_index, on_model_axes, reduce_leaves


def mean_over_devices(tree: Any, group: Group, first: bool = False) -> Any:
    """Reduces inexact arrays to their mean, others to the largest; with `first` to device 0's."""
    leaves, structure = jax.tree.flatten(tree)
    if group.devices == 1 or not leaves:
        return tree
    with jax.named_scope("gshard/agree"):
        if first:
            leaves = [jnp.where(group_index(group.axes) == 0, x, _nothing(x)) for x in leaves]
        share = 1 if first else group.devices

        def agreed(leaves: list[jax.Array]) -> list[jax.Array]:
            means = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
            wide = [x if first else _wide(x) for x in (leaves[i] for i in means)]
            sums = reduce_leaves(wide, group.axes, BUCKET_SIZE, "agree")
            for i, x in zip(means, sums, strict=True):
                leaves[i] = (x / share).astype(leaves[i].dtype)
            return [x if i in means else extreme(x, group.axes) for i, x in enumerate(leaves)]

        leaves = on_model_axes(agreed, leaves, [jax.P()] * len(leaves), group)
    return jax.tree.unflatten(structure, leaves)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x  # float16 overflows


def max_over_devices(tree: Any, group: Group) -> Any:
    """Computes the elementwise maximum over the devices; NaN where any of the values is NaN."""
    leaves, structure = jax.tree.flatten(tree)
    if group.devices > 1:
        options = {"axes": group.axes, "bucket_size": BUCKET_SIZE, "purpose": "agree"}
        largest = partial(reduce_leaves, **options, reduce=extreme)
        leaves = on_model_axes(largest, leaves, [jax.P()] * len(leaves), group)
    return jax.tree.unflatten(structure, leaves)


def _nothing(x: jax.Array) -> Any:
    """Returns the neutral element of the reduction of `x`: of a sum, or of a maximum, by dtype."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return 0
    return False if x.dtype == jnp.bool_ else jnp.iinfo(x.dtype).min
