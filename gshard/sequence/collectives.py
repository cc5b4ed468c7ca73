"""The collectives over a sequence axis. `size` and `index` also work where no axis is bound."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from gshard._util.errors import GShardError
from gshard._util.gloo import all_gather, reduce_scatter
from gshard._util.validation import shown
from gshard.sequence.view import full_axis, sees_full_sequences


def size(axis: str = "sequence") -> int:
    """The number of devices over which the sequence is sharded; 1 where the axis is not bound.

    Args:
      axis: the mesh axis of the sequence.

    Returns:
      A Python integer, known while JAX traces.

    Raises:
      GShardError: `axis` is not a name, or not that of the sequences of the step.

    Example:
      >>> gshard.sequence.size()  # outside of a step: the sequence is on one device
      1
    """
    if not isinstance(axis, str):
        raise GShardError(f"axis={shown(axis)} must be the name of one mesh axis: 'sequence'.")
    if sees_full_sequences(axis):
        return 1
    try:
        return lax.axis_size(axis)
    except NameError:  # not inside of a `shard_map` over this axis
        if (own := full_axis()) is not None:
            raise GShardError(
                f"axis={axis!r} is not an axis of this step's mesh, whose sequences are sharded "
                f"over {own!r}. Leave axis= out."
            ) from None
    return 1


def index(axis: str = "sequence") -> Any:
    """Which slice of the sequence this device has: its index along the axis, 0 if it is not bound.

    Args:
      axis: the mesh axis of the sequence.

    Returns:
      An int32 scalar from 0 to `size(axis) - 1`.

    Raises:
      GShardError: `axis` is not a name.

    Example:
      >>> gshard.sequence.index()
      0
    """
    return lax.axis_index(axis) if size(axis) > 1 else 0


def rotate(tree: Any, axis: str, hops: int) -> Any:
    """What the device `hops` places before this one has, around the ring."""
    devices = lax.axis_size(axis)
    pairs = [(i, (i + hops) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The slices of all devices, one after the other along `dim`."""
    return all_gather(x, axis, dim)


def scatter_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's slice along `dim` of the sum over devices: the transpose of `gather`."""
    return reduce_scatter(x, axis, dim)


def exchange(x: jax.Array, axis: str, split: int, concat: int) -> jax.Array:
    """Shards dimension `split` instead of dimension `concat`, by one all-to-all."""
    return lax.all_to_all(x, axis, split, concat, tiled=True)


def total(x: jax.Array, axis: str) -> jax.Array:
    """The sum over devices."""
    return lax.psum(x, axis)
