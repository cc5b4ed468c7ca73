"""Makes one part of values that come from nothing: iotas, constants, random numbers.

The random numbers of a part are the bits that one device draws for these entries: threefry computes
each from its own position, so a part draws only its own.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from gshard.train.global_loss.placement import Partition, Placement

_THREEFRY = "threefry2x32"


def iota_part(eqn: Any, partition: Partition, placement: Placement) -> jax.Array:
    """Returns one part of an `iota`."""
    shape, dtype, dim = eqn.outvars[0].aval.shape, eqn.params["dtype"], eqn.params["dimension"]
    if dim == placement.dim:
        return partition.positions(shape, placement).astype(dtype)
    return jax.lax.broadcasted_iota(dtype, partition.local_shape(shape, placement), dim)


def can_draw_part(eqn: Any, key: Any) -> bool:
    """Whether a part of these random bits can be drawn without the others."""
    return (
        key.shape == ()
        and str(jax.random.key_impl(key)) == _THREEFRY
        and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]
        and eqn.params["bit_width"] in (8, 16, 32)
        and math.prod(eqn.outvars[0].aval.shape) < 2**64
    )


def random_bits_part(
    eqn: Any, key: jax.Array, partition: Partition, placement: Placement
) -> jax.Array:
    """Returns one part of `random_bits`: threefry of the position of each entry in the array."""
    out = eqn.outvars[0].aval
    shape, local = out.shape, partition.local_shape(out.shape, placement)
    high = low = jnp.zeros(local, jnp.uint32)
    many = math.prod(shape) > 2**32
    for dim, size in enumerate(shape):
        if dim == placement.dim:
            position = partition.positions(shape, placement)
        else:
            position = jax.lax.broadcasted_iota(jnp.uint32, local, dim)
        if many:
            carry, low = _product(low, size)
            high = high * jnp.uint32(size) + carry
        else:
            low = low * jnp.uint32(size)
        low = low + position
        high = high + (low < position).astype(jnp.uint32) if many else high
    first, second = (jnp.broadcast_to(word, local) for word in jax.random.key_data(key))
    one, other = threefry2x32_p.bind(first, second, high, low)
    return (one ^ other).astype(out.dtype)


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Multiplies uint32 by an integer below 2**32; returns the high and the low word."""
    mask, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    a, b = x >> half, x & mask
    c, d = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    middle = a * d + ((b * d) >> half)
    cross = (middle & mask) + b * c
    return a * c + (middle >> half) + (cross >> half), x * jnp.uint32(factor)
