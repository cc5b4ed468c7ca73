"""Random numbers that are a function of some bits, for rounding up or down at random.

A few integer operations, which XLA fuses into what reads them, where `jax.random` would take more
time than all else in a rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that changes half of the bits (C. Wellons' `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(bits: jax.Array) -> jax.Array:
    """Makes float32 numbers in [0, 1) of `mixed` bits (uint32)."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24
