"""`Bounds`: where a shard is in its array, as numbers that can be compared and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # first and last + 1 of a shard, by dimension


def bounds_of(index: Sequence[slice] | None, shape: tuple[int, ...]) -> Bounds:
    """An index of JAX into an array of this shape."""
    whole = (slice(None),) * len(shape) if index is None else index
    return tuple(part.indices(size)[:2] for part, size in zip(whole, shape, strict=True))
