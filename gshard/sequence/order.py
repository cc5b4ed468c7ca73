"""Which tokens of the sequence a device has: in slices one after the other, or in zig-zag order.

In zig-zag order the sequence is cut into 2S slices for S devices, and device i has the slices i and
2S-1-i. Under causal attention a token attends to those before it, so devices with one contiguous
slice have unequal work: the last one has about twice the average. In zig-zag order all are equal.
Source: Brandon et al. 2023, Striped Attention (arXiv 2311.09431), which balances by single tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gshard._util.errors import GShardError
from gshard._util.validation import check_choice, check_integer, dimension, shown
from gshard.sequence.collectives import index, rotate, size
from gshard.sequence.view import of_slices, sees_full_sequences

Order = Literal["contiguous", "zigzag"]
ORDERS = ("contiguous", "zigzag")


def check_halves(length: int, devices: int, order: str, axis: str) -> None:
    """Refuses an unknown order, and an odd slice that cannot hold two slices of the sequence."""
    check_choice("order", order, ORDERS)
    if order == "zigzag" and sees_full_sequences(axis):
        raise GShardError(
            'order="zigzag" does not apply inside a step of gshard, whose losses see sequences in '
            "their own order. Leave it out, and do not reorder the batch."
        )
    if order == "zigzag" and devices > 1 and length % 2:
        raise GShardError(
            f'order="zigzag" gives each device two slices of the sequence, but it has {length} '
            f"tokens. Pad the sequence to a multiple of {2 * devices} tokens (2 x {devices} "
            'devices), or use order="contiguous".'
        )


def positions_of(source: Any, length: int, devices: int, order: str) -> jax.Array:
    """The positions in the sequence of the tokens that device `source` has; int32 (length,)."""
    if order == "zigzag" and devices > 1:
        half = length // 2
        steps = jnp.arange(half, dtype=jnp.int32)
        return jnp.concatenate([source * half + steps, (2 * devices - 1 - source) * half + steps])
    return source * length + jnp.arange(length, dtype=jnp.int32)


def positions(x: Any, *, order: Order = "contiguous", axis: str = "sequence") -> jax.Array:
    """The positions in the whole sequence of the tokens that this device has.

    Use them for position embeddings and masks in a `shard_map` of your own, where
    `jnp.arange(x.shape[1])` starts at 0 on every device. In a train step of gshard, and where the
    axis is not bound, `jnp.arange(x.shape[1])` is right, and this gives the same.

    Args:
      x: an array (batch, T/S, ...), or the number T/S of tokens of a device.
      order: how the sequence is split over the devices, see `zigzag`.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      int32 (T/S,).

    Raises:
      GShardError: an array without a sequence dimension, an unknown order, or a slice that is odd
        in zig-zag order.

    Example:
      >>> tokens = jnp.zeros((2, 4), int)
      >>> gshard.sequence.positions(tokens)
      Array([0, 1, 2, 3], dtype=int32)
    """
    length = length_of(x) if np.ndim(x) else check_integer("x", x, 1, " of tokens")
    devices = size(axis)
    check_halves(length, devices, order, axis)
    return positions_of(index(axis), length, devices, order)


def length_of(x: Any, argument: str = "x") -> int:
    """The number of tokens of an array (batch, T/S, ...)."""
    if np.ndim(x) < 2:
        raise GShardError(
            f"{argument} has shape {np.shape(x)}: it needs two dimensions or more, (batch, tokens "
            "of this device, ...)."
        )
    return np.shape(x)[1]


# ---- the order of whole sequences ---------------------------------------------------------------


def zigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """Reorders a whole sequence, so that contiguous slices of it are the zig-zag slices.

    Call it on the host, on every array of a batch that has a sequence dimension, before the batch
    is placed on the devices. Then pass `order="zigzag"` to the functions of this module.

    Args:
      x: an array with the whole sequence along `dim`, of NumPy or JAX.
      devices: the number S of devices over which the sequence is sharded.
      dim: the dimension of the sequence.

    Returns:
      An array of the same shape and type. Cut into S slices, its slice i holds the slices i and
      2S-1-i of `x` cut into 2S.

    Raises:
      GShardError: the sequence is not a multiple of 2S tokens, or there is no such dimension.

    Example:
      >>> gshard.sequence.zigzag(np.arange(8)[None], 2)
      array([[0, 1, 6, 7, 2, 3, 4, 5]])
    """
    return _reordered(x, devices, dim, back=False)


def unzigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """Puts a sequence that `zigzag` has reordered, or outputs for it, back in order.

    Args:
      x: an array with the whole sequence along `dim`, of NumPy or JAX.
      devices: the number S of devices over which the sequence is sharded.
      dim: the dimension of the sequence.

    Returns:
      An array of the same shape and type.

    Raises:
      GShardError: the sequence is not a multiple of 2S tokens, or there is no such dimension.

    Example:
      >>> gshard.sequence.unzigzag(np.array([[0, 1, 6, 7, 2, 3, 4, 5]]), 2)
      array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    return _reordered(x, devices, dim, back=True)


def slices_in_order(devices: int) -> list[int]:
    """The slices of the sequence in the order in which the devices have them."""
    return [x for i in range(devices) for x in (i, 2 * devices - 1 - i)]


def _reordered(x: Any, devices: int, dim: int, *, back: bool) -> Any:
    devices = check_integer("devices", devices, 1, " of devices")
    known = dimension(dim, np.ndim(x))
    if known is None:
        raise GShardError(
            f"dim={shown(dim)} is not a dimension of an array of shape {np.shape(x)}."
        )
    shape = np.shape(x)
    slices = 2 * devices if devices > 1 else 1
    if shape[known] % slices:
        raise GShardError(
            f"the sequence has {shape[known]} tokens along dim={dim}, which zig-zag order for "
            f"{devices} devices cuts into {slices} equal slices. Pad it to a multiple of {slices}."
        )
    if devices == 1:
        return x
    order = slices_in_order(devices)
    order = np.argsort(order) if back else np.array(order)
    pieces = x.reshape(*shape[:known], slices, -1, *shape[known + 1 :])
    return pieces.take(order, axis=known).reshape(shape)


# ---- adjacent tokens ----------------------------------------------------------------------------


@of_slices({"tokens": 1}, result=1)
def shift_left(
    tokens: Any, fill: Any = 0, *, order: Order = "contiguous", axis: str = "sequence"
) -> jax.Array:
    """The next token of every token, also across the end of a device's slice.

    These are the targets of a language model. In a `shard_map` of your own `tokens[:, 1:]` misses
    the first token of the next device; in a train step of gshard it is right, and gathers integers.

    Args:
      tokens: (batch, T/S, ...), any dtype.
      fill: a scalar for the last position of the sequence, which has no next token. Leave it out
        of the loss. Of integer tokens it is an integer that their dtype holds.
      order: how the sequence is split over the devices, see `zigzag`.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      An array of the same shape and dtype.

    Raises:
      GShardError: an array without a sequence dimension, an unknown order, a slice that is odd in
        zig-zag order, or a `fill` that does not fit.

    Example:
      >>> gshard.sequence.shift_left(jnp.array([[5, 6, 7]]), fill=-1)
      Array([[ 6,  7, -1]], dtype=int32)
    """
    return _shifted(tokens, fill, order, axis, left=True)


@of_slices({"tokens": 1}, result=1)
def shift_right(
    tokens: Any, fill: Any = 0, *, order: Order = "contiguous", axis: str = "sequence"
) -> jax.Array:
    """The previous token of every token, also across the start of a device's slice.

    These are the inputs of a decoder whose targets are `tokens`.

    Args:
      tokens: (batch, T/S, ...), any dtype.
      fill: a scalar for the first position of the sequence, which has no previous token. Of
        integer tokens it is an integer that their dtype holds.
      order: how the sequence is split over the devices, see `zigzag`.
      axis: the mesh axis over which the sequence is sharded.

    Returns:
      An array of the same shape and dtype.

    Raises:
      GShardError: an array without a sequence dimension, an unknown order, a slice that is odd in
        zig-zag order, or a `fill` that does not fit.

    Example:
      >>> gshard.sequence.shift_right(jnp.array([[5, 6, 7]]), fill=-1)
      Array([[-1,  5,  6]], dtype=int32)
    """
    return _shifted(tokens, fill, order, axis, left=False)


def _shifted(tokens: Any, fill: Any, order: str, axis: str, *, left: bool) -> jax.Array:
    length, devices, own = length_of(tokens, "tokens"), size(axis), index(axis)
    check_halves(length, devices, order, axis)
    tokens = jnp.asarray(tokens)
    _check_fill(fill, tokens.dtype)
    edge = jnp.full_like(tokens[:, :1], fill)

    def shifted(x: jax.Array, seam: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:, 1:], seam] if left else [seam, x[:, :-1]], 1)

    def border(x: jax.Array) -> jax.Array:  # what the slice before (or after) this one needs
        return x[:, :1] if left else x[:, -1:]

    if devices == 1:
        return shifted(tokens, edge)
    back = -1 if left else 1  # the device before sends to the right, the one after to the left
    ends = own == devices - 1, own == 0
    if order == "contiguous":
        seam = rotate(border(tokens), axis, back)
        return shifted(tokens, jnp.where(ends[0] if left else ends[1], edge, seam))
    # The slice after the first half is on the next device, that after the second on the previous
    # one. The last device has two adjacent slices, and device 0 both ends of the sequence.
    first, second = jnp.split(tokens, 2, axis=1)
    of_first = rotate(border(first), axis, back)
    of_second = rotate(border(second), axis, -back)
    if left:
        of_first = jnp.where(ends[0], border(second), of_first)
        of_second = jnp.where(ends[1], edge, of_second)
    else:
        of_first = jnp.where(ends[1], edge, of_first)
        of_second = jnp.where(ends[0], border(first), of_second)
    return jnp.concatenate([shifted(first, of_first), shifted(second, of_second)], 1)


def _check_fill(fill: Any, dtype: Any) -> None:
    if np.ndim(fill):
        raise GShardError(f"fill has shape {np.shape(fill)}: pass a scalar.")
    if isinstance(fill, core.Tracer) or not jnp.issubdtype(dtype, jnp.integer):
        return
    # A cast would wrap around: -100 as uint8 is 156, which a loss takes for a token.
    number, info = np.asarray(fill).item(), jnp.iinfo(dtype)
    if not (info.min <= number <= info.max and number == int(number)):
        raise GShardError(
            f"fill={shown(number)} does not fit {dtype}, the dtype of tokens: pass an integer from "
            f"{info.min} to {info.max}, or tokens.astype(jnp.int32)."
        )
