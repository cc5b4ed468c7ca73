"""Buckets: which leaves share a collective, and how they are packed into one array for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from gshard._util.gloo import uses_gloo
from gshard.sharding.group import Group
from gshard.sharding.layout import Layout

BUCKET_SIZE = 2**23  # elements of a bucket, by default
MAX_LEAVES = 50  # in a bucket: XLA's compile time grows fast with the operands of a concatenation
LARGE_LAYER = 2**22  # stacks of layers with at least so many elements are gathered layer by layer
# Not on CPU, where a collective may overtake the loop over the layers (`loop_order`).
LAYERED_PLATFORMS = ("gpu", "tpu")
LARGE_LEAF = 2**17  # elements above which copying a leaf costs more than a collective of its own
# Between processes on CPU each collective waits for all processes, and long ones are much slower.
GLOO_BUCKET_SIZE = 2**19
# Elements of the first and the last of several buckets: with a small first bucket communication
# starts early, and with a small last one little is left to wait for at the end. This is 1 MiB of
# float32, as for the last bucket of `paddle.DataParallel`.
END_BUCKET_SIZE = 2**18
# A dimension order is constrained on GPU only. On TPU a narrow matrix is stored transposed, and is
# padded in any other order; on CPU no second order was seen. `jax.export` refuses programs with
# such a constraint.
_ORDERED_PLATFORMS = ("gpu",)


def assign_buckets(sizes: Sequence[int], kinds: Sequence[Any], bucket_size: int) -> list[list[int]]:
    """Groups consecutive leaves of one kind into buckets of at most `bucket_size` elements.

    A leaf of more than a quarter of that, or of more than `LARGE_LEAF`, is communicated alone, so
    that it is not copied. Between several processes on CPU all leaves share buckets, of at most
    `GLOO_BUCKET_SIZE` elements. With 0 every leaf is alone. Returns the indices of each bucket.
    """
    alone = min(LARGE_LEAF, bucket_size // 4)
    if uses_gloo():
        alone = bucket_size = min(GLOO_BUCKET_SIZE, bucket_size)
    found: list[list[int]] = []
    latest: dict[Any, list[int]] = {}  # the bucket that is being filled, by kind
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if size > alone:
            found.append([i])
            continue
        bucket = latest.get(kind, ())
        full = sum(sizes[j] for j in bucket) + size > bucket_size or len(bucket) >= MAX_LEAVES
        if not bucket or full:
            latest[kind] = []
            found.append(latest[kind])
        latest[kind].append(i)
    return found


def ordered_buckets(
    sizes: Sequence[int], bucket_size: int, end_bucket_size: int = END_BUCKET_SIZE
) -> list[list[int]]:
    """Groups consecutive leaves into buckets that are reduced one after the other.

    A larger leaf is alone in its bucket. All leaves share one bucket if `bucket_size` is 0, and
    between several processes on CPU, where collectives do not overlap with computation.
    """
    if not bucket_size or uses_gloo():
        return [list(range(len(sizes)))]
    first, rest = _filled(sizes, range(len(sizes)), min(end_bucket_size, bucket_size))
    last, middle = _filled(sizes, rest[::-1], min(end_bucket_size, bucket_size))
    found, middle = [first], middle[::-1]
    while middle:
        bucket, middle = _filled(sizes, middle, bucket_size)
        found.append(bucket)
    return [bucket for bucket in (*found, last[::-1]) if bucket]


def _filled(sizes: Sequence[int], order: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Splits `order` after as many leaves as fit into `most` elements, but at least one."""
    total, n = 0, 0
    while n < len(order) and (not n or total + sizes[order[n]] <= most):
        total += sizes[order[n]]
        n += 1
    return list(order[:n]), list(order[n:])


def default_reduce_bucket(group: Group) -> int:
    """Elements of a bucket of all-reduced gradients by default; 0 on CPU in one process.

    XLA merges these all-reduces there, and nothing overlaps with them. It would fuse the slices of
    a bucket into what reads them, and compile a kernel for each place in the bucket: three times as
    long for a GPT of 12 layers as one kernel for all arrays of a shape.
    """
    return 0 if group.platform == "cpu" and not uses_gloo() else BUCKET_SIZE


def is_gathered_by_layer(layout: Layout) -> bool:
    """Whether it is a stack of large layers, sharded on a later dimension."""
    size = math.prod(layout.stored_shape[layout.dim :]) if layout.dim else 0
    return size >= LARGE_LAYER and layout.group.platform in LAYERED_PLATFORMS


def layer_names(paths: Sequence[str]) -> list[str]:
    """Names the layer of the model that each path belongs to, by the numbers in its keys.

    The name is the shortest prefix that ends with a number and that also occurs with another number
    (`block_3` of `block_3/up/kernel`); if there is none, the path up to its last key.
    """
    numbered = [[m.span() for m in re.finditer(r"\d+", path)] for path in paths]
    counts: dict[str, set[str]] = {}
    for path, spans in zip(paths, numbered, strict=True):
        for start, end in spans:
            counts.setdefault(path[:start], set()).add(path[start:end])
    return [
        next((p[:end] for start, end in spans if len(counts[p[:start]]) > 1), p.rpartition("/")[0])
        for p, spans in zip(paths, numbered, strict=True)
    ]


def map_in_buckets(
    leaves: Sequence[jax.Array],
    layouts: Sequence[Layout],
    bucket_size: int,
    alone: Callable[[jax.Array, Layout], jax.Array],
    packed: Callable[[list[jax.Array], list[Layout]], list[jax.Array]],
) -> list[jax.Array]:
    """Communicates sharded leaves by `alone` (one) or `packed` (several); keeps replicated ones."""
    sharded = [i for i, layout in enumerate(layouts) if layout.dim is not None]
    quantized = [layout.gathered_as or layout.scattered_as for layout in layouts]
    kinds = [(leaves[i].dtype, layouts[i].group, quantized[i] is None) for i in sharded]
    out = list(leaves)
    for bucket in assign_buckets([layouts[i].stored_size for i in sharded], kinds, bucket_size):
        members = [sharded[j] for j in bucket]
        if len(members) == 1:
            results = [alone(leaves[members[0]], layouts[members[0]])]
        else:
            results = packed([leaves[i] for i in members], [layouts[i] for i in members])
        for i, result in zip(members, results, strict=True):
            out[i] = result
    return out


def pack(x: jax.Array, layout: Layout, n: int) -> jax.Array:
    """Reshapes a leaf to `(n, elements / n)`: row i is shard i of the sharded dimension."""
    first = jnp.moveaxis(x, layout.dim, 0) if layout.dim else x
    return first.reshape(n, -1)


def unpack(rows: jax.Array, layout: Layout, n: int) -> jax.Array:
    """Inverts `pack` for `n` shards."""
    dim = layout.dim or 0
    part = layout.shard_shape
    shape = (part[dim] * n, *part[:dim], *part[dim + 1 :])
    array = lax.reshape(rows, shape)
    return jnp.moveaxis(array, 0, dim) if dim else array


def split_packed(row: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits a concatenation along dimension 1 into arrays as wide as those of `like`."""
    out, start = [], 0
    for x in like:
        out.append(lax.slice_in_dim(row, start, start + x.shape[1], axis=1))
        start += x.shape[1]
    return out


def keep_dimension_order(x: jax.Array, group: Group) -> jax.Array:
    """Constrains an array on GPU to have its first dimension outermost in memory.

    XLA gives an array that a loop only reads the order that suits one use best, and copies all of
    it before the loop; with this constraint that use transposes what it reads. Model-parallel axes
    exclude it: XLA:GPU would gather the array over them.
    """
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if group.platform not in _ORDERED_PLATFORMS or group.model_axes or keys or x.ndim < 2:
        return x
    return with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))
