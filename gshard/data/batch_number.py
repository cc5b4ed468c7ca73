"""Remembers the numbers of the global batches that a loader gave, without changing them."""

from __future__ import annotations

import weakref
from typing import Any

import jax

MASK = "mask"  # its array in a batch of `DataLoader(pad_last=True)`
# By identity of a batch's first array: its number, and whether it may have padding.
_numbers: dict[int, tuple[weakref.ref[Any], int, bool]] = {}


def set_number(batch: Any, number: int, padded: bool = False) -> None:
    """Remembers the number of a batch, as long as its first array lives."""
    first = next((x for x in jax.tree.leaves(batch) if isinstance(x, jax.Array) and x.ndim), None)
    if first is not None:
        key = id(first)
        _numbers[key] = weakref.ref(first, lambda _: _numbers.pop(key, None)), number, padded


def number_of(batch: Any) -> int | None:
    """Returns the number of a batch, or None if it is not as a loader gave it."""
    found = _found(batch)
    return None if found is None else found[1]


def may_have_padding(batch: Any) -> bool:
    """Whether a batch has a mask of a loader's, which is False for padding."""
    found = _found(batch)
    return found is not None and found[2] and isinstance(batch, dict) and MASK in batch


def _found(batch: Any) -> tuple[Any, int, bool] | None:
    for x in jax.tree.leaves(batch):
        if (found := _numbers.get(id(x))) is not None and found[0]() is x:
            return found
    return None
