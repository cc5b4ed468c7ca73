"""How the arrays of a batch are sharded: examples on dimension 0, sequences on dimension 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten, subscript
from gshard.sharding.group import Group
from gshard.sharding.topology import SEQUENCE


def sequence_dims(batch: Any, group: Group, slices: int = 1) -> list[int | None]:
    """Returns the dimension of each leaf that is sharded over the sequence axis, None for no one.

    Dimension 1 is, where it is a multiple of the axis, whatever it means: where an array is stored
    does not change what a loss computes. Others are replicated over the axis.

    Args:
      batch: a tree of arrays, of which shapes alone are read.
      group: the data axes.
      slices: of a sequence on each device; 2 in zig-zag order.

    Raises:
      GShardError: the longest dimension 1 cannot be sharded, so that the axis would be of no use.
    """
    if group.sequence == 1:
        return [None] * len(jax.tree.leaves(batch))
    size = group.sequence * slices
    paths, leaves, _ = flatten(batch)
    if not leaves:
        return []
    lengths = [jnp.shape(x)[1] if jnp.ndim(x) > 1 else 0 for x in leaves]
    longest = max(range(len(leaves)), key=lengths.__getitem__)
    where, length = f"batch{subscript(paths[longest])}", lengths[longest]
    if not length:
        raise GShardError(
            f"the mesh has a sequence axis of {group.sequence} devices, and no array of the batch "
            "has a dimension 1 to shard over it. Use a mesh without sequence=."
        )
    if length % size:
        fitting = [n for n in (length // size * size, (length // size + 1) * size) if n]
        order = " in zig-zag order, which takes two slices each" if slices > 1 else ""
        over = f"{group.sequence} devices of the sequence axis{order}"
        raise GShardError(
            f"{where} has shape {list(jnp.shape(leaves[longest]))}: its sequences of {length} "
            f"cannot be shared by the {over}. Use sequences of {' or '.join(map(str, fitting))}. "
            "(Targets that are inputs shifted by one: pass both, tokens[:, :-1] and tokens[:, 1:], "
            "or one array and shift in the loss. Dimension 1 is no sequence, such as that of "
            "one-hot labels: pass it as dimension 2, labels[:, None].)"
        )
    return [1 if n and n % size == 0 else None for n in lengths]


def spec_of(x: Any, dim: int | None, group: Group) -> jax.P:
    """Returns the `PartitionSpec` of one array, of which this dimension is of the sequence."""
    if not jnp.ndim(x):
        return jax.P()
    axes = group.batch_axes
    return jax.P(axes) if dim is None else jax.P(axes, *[None] * (dim - 1), SEQUENCE)
