"""Quantizes arrays for collectives: parameters before an all-gather, gradients for a scatter.

An array becomes one array of bytes, its codes followed by the scales of their blocks, so that one
collective sends both. A scale is the largest entry of a block divided by the largest code, rounded
up to bfloat16, so that no code is clipped. An infinity or a NaN makes its block non-finite.

A quantized reduce-scatter is an all-to-all along each shard axis and a sum in float32: a sum of
codes would overflow, and have other scales. Devices of a node exchange first, so that what goes
over the network is 1 / (devices of a node) of the gradient.

Source: ZeRO++ (Wang et al., 2023), sections 4.1 and 4.3; stochastic rounding: Gupta et al. (2015),
section 3.1.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard._util.arrays import padded
from gshard._util.random_bits import mixed, uniform
from gshard.sharding.layout import Layout
from gshard.sharding.quantized import LARGEST, BlockCodes
from gshard.train.comm.buckets import split_packed


def quantize(x: jax.Array, how: BlockCodes, seed: jax.Array | None = None) -> jax.Array:
    """Packs a floating array into bytes (uint8), of shape `how.packed_shape(x.shape)`.

    Args:
      x: any floating array.
      how: dtype and dimension of the codes.
      seed: uint32 scalar for stochastic rounding.
    """
    dim, size = how.dim + x.ndim, x.shape[how.dim]
    wide = x.astype(jnp.float32)
    scales = _scales(wide, how)
    codes = wide / _each(jnp.where(scales == 0, 1, scales), how, size)
    if how.stochastic:
        most = LARGEST[how.dtype]  # 7 + (1 - 2^-24) is 8 in float32, a nibble that means -8
        codes = jnp.clip(jnp.floor(codes + _uniform(x.shape, seed)), -most, most)
    elif how.dtype.startswith("int"):
        codes = jnp.round(codes)
    if how.dtype.startswith("int"):
        codes = codes.astype(jnp.int8)
    else:
        codes = codes.astype(how.dtype)
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    if how.dtype == "int4":
        half = how.code_bytes(size)
        low = lax.slice_in_dim(codes, 0, half, axis=dim)
        high = padded(lax.slice_in_dim(codes, half, size, axis=dim), dim, half)
        codes = (low & 15) | (high << 4)
    bits = lax.bitcast_convert_type(scales, jnp.uint16)
    return lax.concatenate([codes, *((bits >> n).astype(jnp.uint8) for n in (0, 8))], dim)


def dequantize(packed: jax.Array, how: BlockCodes, size: int) -> jax.Array:
    """Returns the float32 array that `packed` stands for, of `size` entries along `how.dim`."""
    dim, count = how.dim + packed.ndim, how.blocks(size)[0]
    ends = [how.code_bytes(size), count, count]
    codes, low, high = lax.split(packed, ends, axis=dim)
    if how.dtype == "int4":
        halves = [codes << 4, codes]  # an arithmetic shift to the right extends the sign
        halves = [lax.bitcast_convert_type(x, jnp.int8) >> 4 for x in halves]
        codes = lax.slice_in_dim(lax.concatenate(halves, dim), 0, size, axis=dim)
    else:
        dtype = jnp.int8 if how.dtype == "int8" else jnp.dtype(how.dtype)
        codes = lax.bitcast_convert_type(codes, dtype)
    bits = low.astype(jnp.uint16) | (high.astype(jnp.uint16) << 8)
    scales = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return codes.astype(jnp.float32) * _each(scales, how, size)


def _scales(wide: jax.Array, how: BlockCodes) -> jax.Array:
    """Returns the scale of every block, bfloat16."""
    dim, shape = how.dim + wide.ndim, wide.shape
    count, length = how.blocks(shape[dim])
    blocks = padded(jnp.abs(wide), dim, count * length)
    blocks = blocks.reshape(*shape[:dim], count, length, *shape[dim + 1 :])
    # At least a last place of bfloat16 (2^-8) above, so that rounding does not make it smaller.
    scales = (blocks.max(dim + 1) * ((1 + 2**-8) / LARGEST[how.dtype])).astype(jnp.bfloat16)
    # A subnormal number has fewer bits: rounded down, codes would not fit.
    return jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales)


def _each(scales: jax.Array, how: BlockCodes, size: int) -> jax.Array:
    """Repeats the scale of a block for each of its entries, float32."""
    dim, (count, length) = how.dim + scales.ndim, how.blocks(size)
    shape = (*scales.shape[:dim], count, length, *scales.shape[dim + 1 :])
    kept = [i for i in range(len(shape)) if i != dim + 1]
    each = lax.broadcast_in_dim(scales.astype(jnp.float32), shape, kept)
    each = each.reshape(*shape[:dim], count * length, *shape[dim + 2 :])
    return lax.slice_in_dim(each, 0, size, axis=dim)


def _uniform(shape: Sequence[int], seed: jax.Array | None) -> jax.Array:
    """Makes random float32 numbers in [0, 1), a function of the seed and the position alone."""
    if seed is None:
        raise ValueError("stochastic rounding needs a seed")
    position, stride = jnp.zeros((), jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        position += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return uniform(mixed(mixed(position) ^ seed))


def fold(seed: jax.Array | None, *numbers: jax.Array | int | str) -> jax.Array | None:
    """Makes another seed of one, for each combination of numbers or names; None stays None."""
    if seed is None:
        return None
    for number in numbers:
        of_name = zlib.crc32(number.encode()) if isinstance(number, str) else number
        seed = mixed(seed + mixed(jnp.asarray(of_name, jnp.uint32) + jnp.uint32(0x9E3779B9)))
    return seed


def scatter_quantized(
    full: Sequence[jax.Array], layouts: Sequence[Layout], seed: jax.Array | None
) -> list[jax.Array]:
    """Reduce-scatters arrays in storage shapes, in one all-to-all along each shard axis.

    `layouts`, all with `scattered_as` and of one group, are those of one model-parallel rank.
    """
    group, found = layouts[0].group, list(full)
    seed = fold(seed, lax.axis_index(group.axes))
    for axis, n in zip(group.shard, group.sizes, strict=True):
        if n > 1:
            found = _one_hop(found, layouts, axis, n, fold(seed, axis))
    return [new.astype(x.dtype) for new, x in zip(found, full, strict=True)]


def _one_hop(
    full: Sequence[jax.Array],
    layouts: Sequence[Layout],
    axis: str,
    n: int,
    seed: jax.Array | None,
) -> list[jax.Array]:
    """Sends every device along `axis` its n-th of each array, and sums what arrives (float32)."""
    dims = [layout.dim or 0 for layout in layouts]
    parts = [
        x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
        for x, dim in zip(full, dims, strict=True)
    ]
    hows = [_of_parts(layout) for layout in layouts]
    codes = [
        quantize(x, how, fold(seed, layout.path))
        for x, how, layout in zip(parts, hows, layouts, strict=True)
    ]
    if len(codes) == 1:
        received = [lax.all_to_all(codes[0], axis, dims[0], dims[0])]
    else:
        first = [jnp.moveaxis(x, dim, 0) for x, dim in zip(codes, dims, strict=True)]
        rows = [x.reshape(n, -1) for x in first]
        row = lax.all_to_all(jnp.concatenate(rows, axis=1), axis, 0, 0)
        split = zip(split_packed(row, rows), first, dims, strict=True)
        received = [jnp.moveaxis(r.reshape(x.shape), 0, dim) for r, x, dim in split]
    return [
        dequantize(x, how, part.shape[how.dim]).sum(dim)
        for x, how, part, dim in zip(received, hows, parts, dims, strict=True)
    ]


def _of_parts(layout: Layout) -> BlockCodes:
    """Returns how a gradient is quantized once its sharded dimension is split into two."""
    how = layout.scattered_as
    if how is None:
        raise ValueError(f"{layout.path} is not quantized")
    before = how.dim + len(layout.shape) < (layout.dim or 0)
    return dataclasses.replace(how, dim=how.dim - 1) if before else how


def packed(shard: jax.Array, layout: Layout) -> jax.Array:
    """Returns what an all-gather sends of a shard: the shard itself, or its codes and scales."""
    how = layout.gathered_as
    return shard if how is None else quantize(shard, how)


def unpacked(x: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Inverts `packed`, once shards are gathered; `layout` is that of one model-parallel rank."""
    how = layout.gathered_as
    return x if how is None else dequantize(x, how, layout.shape[how.dim]).astype(dtype)
