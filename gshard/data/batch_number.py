"""Remembers the numbers of the global batches that a loader gave, without changing them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import jax

MASK = "mask"  # its array in a batch of `DataLoader(pad_last=True)`
# By identity of an array: the number of its batch, whether that may have padding, and whether the
# array is the mask of it.
_numbers: dict[int, tuple[weakref.ref[Any], int, bool, bool]] = {}


def set_number(batch: Any, number: int, mask: Any = None) -> None:
    """Remembers the number of a batch, as long as its first array lives.

    With `mask`, that of its padding, it remembers all arrays: their use without it is warned of.
    """
    padded = mask is not None
    arrays = [x for x in jax.tree.leaves(batch) if isinstance(x, jax.Array) and x.ndim]
    for x in arrays if padded else arrays[:1]:
        # No Python function: it often runs while a step begins, and Python drops a Ctrl-C in one.
        forget = partial(_numbers.pop, id(x))
        _numbers[id(x)] = weakref.ref(x, forget), number, padded, x is mask


def number_of(batch: Any) -> int | None:
    """Returns the number of a batch, or None if it is not as a loader gave it."""
    found = _found(batch)
    return None if found is None else found[1]


def may_have_padding(batch: Any) -> bool:
    """Whether arrays of a batch are of a loader that fills its last batch."""
    found = _found(batch)
    return found is not None and found[2]


def is_mask(x: Any) -> bool:
    """Whether an array is the mask of such a batch, whatever the user calls it."""
    found = _found(x)
    return found is not None and found[3]


def _found(batch: Any) -> tuple[Any, int, bool, bool] | None:
    for x in jax.tree.leaves(batch):
        if (found := _numbers.get(id(x))) is not None and found[0]() is x:
            return found
    return None
