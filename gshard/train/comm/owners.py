"""Sends the shards of many equal arrays to the devices that own one array each, and back.

All functions run inside a `shard_map` over the data axes. With N devices in the shard group, of
`items` arrays every device owns `items / N`, in the order of `own_items`. Replicas share the arrays
among them, too, where the number of items allows it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from gshard.sharding.group import Group
from gshard.train.comm.collectives import group_index


def own_items(x: jax.Array, group: Group, replicas: int) -> jax.Array:
    """Returns this device's rows of an array that every device has, `(items, ...)`."""
    index = group_index(group.shard[::-1])  # as `to_owners` splits them
    if replicas > 1:
        index += group_index(group.replica) * group.size
    size = x.shape[0] // (group.size * replicas)
    return lax.dynamic_slice_in_dim(x, index * size, size)


def to_owners(shards: jax.Array, dim: int, group: Group, replicas: int) -> jax.Array:
    """Returns the full arrays that this device owns.

    Args:
      shards: this device's shards of all arrays, `(items, ...)`.
      dim: the sharded dimension of `shards`, not 0.
      group: the shard group.
      replicas: how many replicas share the items: 1, so that each computes all, or all of them.
    """
    if replicas > 1:
        size = shards.shape[0] // replicas
        shards = lax.dynamic_slice_in_dim(shards, group_index(group.replica) * size, size)
    with jax.named_scope("gshard/optimizer"):
        for hop in group.hops:
            shards = lax.all_to_all(shards, hop.axis, 0, dim, tiled=True)
    return shards


def from_owners(own: jax.Array, dim: int | None, group: Group, replicas: int) -> jax.Array:
    """Returns this device's shards of all arrays, from the full arrays that each device owns.

    The size of dimension `dim` is a multiple of the shard group's; with None all devices get the
    full arrays.
    """
    with jax.named_scope("gshard/optimizer"):
        for hop in group.hops[::-1]:
            if dim is None:
                own = lax.all_gather(own, hop.axis, tiled=True)
            else:
                own = lax.all_to_all(own, hop.axis, dim, 0, tiled=True)
        for axis in group.replica[::-1] if replicas > 1 else ():
            own = lax.all_gather(own, axis, tiled=True)
    return own


def in_items(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Splits a stack along `dims`: `(items, ...)`, with size 1 where the item had these."""
    if not dims:
        return x[None]
    sizes = (1 if d in dims else n for d, n in enumerate(x.shape))
    return jnp.moveaxis(x, dims, range(len(dims))).reshape(-1, *sizes)


def from_items(x: jax.Array, dims: tuple[int, ...], counts: tuple[int, ...]) -> jax.Array:
    """Undoes `in_items`, for a stack with `counts` entries along `dims`.

    Entries that share a dimension, also with what an item has there, follow the first split.
    """
    item, many = x.shape[1:], len(dims)
    axes = [[*(i for i in range(many) if dims[i] == d), many + d] for d in range(len(item))]
    parts = x.reshape(*counts, *item)
    sizes = (math.prod(parts.shape[i] for i in of_dim) for of_dim in axes)
    return parts.transpose([i for of_dim in axes for i in of_dim]).reshape(tuple(sizes))
