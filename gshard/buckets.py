"""Buckets: which leaves share a collective, and how they lie in one array for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.layout import Layout

BUFFER_MAX_SIZE = 2**23  # elements of a bucket, by default
MOST_LEAVES = 50  # in a bucket: XLA's compile time grows fast with the operands of a concatenation
LARGE = 2**17  # elements of a leaf that costs more to copy than to move alone (benchmarks)
# Between processes on CPU each collective waits for all of them, and longer ones are slower by far.
LONGEST_OVER_GLOO = 2**19


def buckets(sizes: Sequence[int], kinds: Sequence[Any], buffer_max_size: int) -> list[list[int]]:
    """Groups neighbouring leaves of one kind into buckets of at most `buffer_max_size` elements.

    A leaf of more than a quarter of that, or of more than `LARGE`, goes alone, without a copy. Over
    several processes on CPU all leaves share buckets, of at most `LONGEST_OVER_GLOO` elements. 0
    puts every leaf alone.

    Args:
      sizes: elements of each whole leaf.
      kinds: hashable; only leaves of one kind share a bucket.
      buffer_max_size: elements.

    Returns:
      Lists of indices, together every index once.
    """
    over_gloo = jax.process_count() > 1 and jax.default_backend() == "cpu"
    alone = min(LARGE, buffer_max_size // 4)
    if over_gloo:
        alone = buffer_max_size = min(LONGEST_OVER_GLOO, buffer_max_size)
    found: list[list[int]] = []
    open_bucket: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if size > alone:
            found.append([i])
            continue
        bucket = open_bucket.get(kind)
        if bucket is None or filled[kind] + size > buffer_max_size or len(bucket) >= MOST_LEAVES:
            bucket, filled[kind] = [], 0
            open_bucket[kind] = bucket
            found.append(bucket)
        bucket.append(i)
        filled[kind] += size
    return found


def layers(paths: Sequence[str]) -> list[str]:
    """Of every path the layer of the model that it lies in, by the numbers in its keys.

    That is its shortest beginning that ends with a number, and of which there is another with
    another number (`block_3` of `block_3/up/kernel`); else the path up to its last key.
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


def in_buckets(
    leaves: Sequence[jax.Array],
    layouts: Sequence[Layout],
    buffer_max_size: int,
    alone: Callable[[jax.Array, Layout], jax.Array],
    packed: Callable[[list[jax.Array], list[Layout]], list[jax.Array]],
) -> list[jax.Array]:
    """Divided leaves moved by `alone` (one) or `packed` (several); whole ones as given."""
    divided = [i for i, layout in enumerate(layouts) if layout.dim is not None]
    kinds = [(leaves[i].dtype, layouts[i].group) for i in divided]
    out = list(leaves)
    for bucket in buckets([layouts[i].stored_size for i in divided], kinds, buffer_max_size):
        members = [divided[j] for j in bucket]
        if len(members) == 1:
            results = [alone(leaves[members[0]], layouts[members[0]])]
        else:
            results = packed([leaves[i] for i in members], [layouts[i] for i in members])
        for i, result in zip(members, results, strict=True):
            out[i] = result
    return out


def to_rows(x: jax.Array, layout: Layout, n: int) -> jax.Array:
    """`(n, elements / n)`: row i holds what lies at place i of the divided dimension."""
    return jnp.moveaxis(x, layout.dim or 0, 0).reshape(n, -1)


def from_rows(rows: jax.Array, layout: Layout, n: int) -> jax.Array:
    """The inverse of `to_rows` for `n` parts."""
    dim = layout.dim or 0
    part = layout.part_shape
    shape = (part[dim] * n, *part[:dim], *part[dim + 1 :])
    return jnp.moveaxis(rows.reshape(shape), 0, dim)


def split_row(row: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Undoes a concatenation along dimension 1 of arrays as wide as `like`."""
    out, start = [], 0
    for x in like:
        out.append(lax.slice_in_dim(row, start, start + x.shape[1], axis=1))
        start += x.shape[1]
    return out
