"""Collectives of values that devices hold in part: examples of the batch, and partial sums.

A dimension of size `outer * devices * n` can be sharded as `(outer, devices, n)`: device i holds
`[:, i, :]`. `outer` is 1 for the examples of a batch, and more after a transposition and a merge.
In zig-zag order the devices are mirrored in every second block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard._util.gloo import all_gather, reduce_scatter

_NARROW = (jnp.float16, jnp.bfloat16)


def mirrored(blocks: jax.Array, dim: int) -> jax.Array:
    """Reverses the devices, on dimension `dim + 1`, in every second block of dimension `dim`."""
    shape = blocks.shape
    pairs = blocks.reshape(*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :])
    first, second = jnp.split(pairs, 2, dim + 1)
    return jnp.concatenate([first, jnp.flip(second, dim + 2)], dim + 1).reshape(shape)


def with_neighbors(
    x: jax.Array, dim: int, before: int, after: int, axis: str, zigzag: bool
) -> list[jax.Array]:
    """The slices of a device, each with positions before and after it, zeros beyond the ends."""
    size = lax.axis_size(axis)
    up = [(i, i + 1) for i in range(size - 1)]
    down = [(i + 1, i) for i in range(size - 1)]
    slices = jnp.split(x, 2, dim) if zigzag else [x]
    last = lax.axis_index(axis) == size - 1

    def ends(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = x.shape[dim]
        first = lax.slice_in_dim(x, 0, after, axis=dim)
        return first, lax.slice_in_dim(x, length - before, length, axis=dim)

    def sent(x: jax.Array, pairs: list[tuple[int, int]], own: jax.Array | None) -> jax.Array:
        """What the neighbor has; `own` on the last device, whose neighbor is its other slice."""
        if not x.shape[dim]:
            return x
        received = lax.ppermute(x, axis, pairs)
        return received if own is None else jnp.where(last, own, received)

    edges = [*map(ends, slices)]
    found = []
    for i, x in enumerate(slices):
        first, end = edges[i]
        other = edges[1 - i] if zigzag else (None, None)
        left = sent(end, down if i else up, other[1] if i else None)
        right = sent(first, up if i else down, None if i else other[0])
        found.append(jnp.concatenate([left, x, right], dim))
    return found


def in_zigzag_order(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """Exchanges the halves of contiguous slices, so that each device has its two of zig-zag order.

    Of 2S slices device i has 2i and 2i+1, and gets i and 2S-1-i: one is the first half of another
    device, and one the second half.
    """
    size = lax.axis_size(axis)
    first, second = jnp.split(x, 2, dim)

    def owner(piece: int) -> int:
        return min(piece, 2 * size - 1 - piece)

    of_first = lax.ppermute(first, axis, [(i, owner(2 * i)) for i in range(size)])
    of_second = lax.ppermute(second, axis, [(i, owner(2 * i + 1)) for i in range(size)])
    even = lax.axis_index(axis) % 2 == 0  # slice i is a first half where i is even
    return jnp.where(
        even,
        jnp.concatenate([of_first, of_second], dim),
        jnp.concatenate([of_second, of_first], dim),
    )


def gather_examples(
    shard: jax.Array, dim: int, outer: int, axes: Sequence[str], zigzag: bool = False
) -> jax.Array:
    """All-gathers a value that is sharded on `dim`, in the order of the global batch."""
    with jax.named_scope("gshard/loss"):
        if outer == 1:
            return all_gather(shard, tuple(axes), dim)
        shape = shard.shape
        split = shard.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
        full = all_gather(split, tuple(axes), dim + 1, tiled=False)
        full = mirrored(full, dim) if zigzag else full
        return full.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def exchange_examples(x: jax.Array, old: int, new: int, axes: Sequence[str]) -> jax.Array:
    """Shards dimension `new` instead of dimension `old`, by one all-to-all."""
    with jax.named_scope("gshard/loss"):
        return lax.all_to_all(x, tuple(axes), new, old, tiled=True)


def scatter_partial(x: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
    """Returns this device's slice along `dim` of a sum over devices, as `sum_partial` sums."""
    with jax.named_scope("gshard/loss"):
        wide = x.astype(jnp.float32) if x.dtype in _NARROW else x
        return reduce_scatter(wide, tuple(axes), dim).astype(x.dtype)


def sum_partial(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums partial sums over the devices; of float16 and bfloat16 in float32."""
    with jax.named_scope("gshard/loss"):
        if x.dtype == jnp.bool_:
            return lax.psum(x.astype(jnp.int32), tuple(axes)).astype(jnp.bool_)
        wide = x.astype(jnp.float32) if x.dtype in _NARROW else x
        return lax.psum(wide, tuple(axes)).astype(x.dtype)


def extreme_of_examples(
    x: jax.Array, dims: tuple[int, ...], largest: bool, axes: Sequence[str]
) -> jax.Array:
    """Computes the maximum or minimum over `dims` and all devices; NaN if any entry is NaN.

    Its derivative is that of `jnp.max` on one device: entries that tie share it.
    """
    axes = tuple(axes)
    pick, over = (lax.reduce_max, lax.pmax) if largest else (lax.reduce_min, lax.pmin)

    def value(x: jax.Array) -> jax.Array:
        with jax.named_scope("gshard/loss"):
            if x.dtype == jnp.bool_:
                return over(pick(x.astype(jnp.int32), dims), axes).astype(jnp.bool_)
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return over(pick(x, dims), axes)
            # A collective maximum may ignore NaN.
            lost = lax.pmax(jnp.any(jnp.isnan(x), dims), axes)
            return jnp.where(lost, jnp.nan, over(pick(x, dims), axes))

    if not jnp.issubdtype(x.dtype, jnp.floating):
        return value(x)
    extreme = jax.custom_jvp(value)

    @extreme.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        found = extreme(x)
        ties = x == jnp.expand_dims(found, dims)
        count = sum_partial(jnp.sum(ties, dims), axes).astype(dx.dtype)
        return found, sum_partial(jnp.sum(jnp.where(ties, dx, 0), dims), axes) / count

    return extreme(x)
