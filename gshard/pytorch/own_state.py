"""Which leaves of an optimizer's state belong to which parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.pytree import belongs_to, flatten


def parameter_of(tree: Any, params: Any) -> list[int | None]:
    """For every leaf of a state, or of its layouts, the position of its parameter; None: of all.

    A leaf belongs to the parameter whose path its own ends in, if every parameter has one beside
    it, or if it has the parameter's shape: a count is none of a parameter named `count`.
    """
    names, leaves, _ = flatten(params)
    at = {name: i for i, name in enumerate(names)}
    paths, own, _ = flatten(tree)
    ends = belongs_to(paths, at)
    beside = Counter(end[0] for end in ends if end is not None)
    found: list[int | None] = []
    for end, x in zip(ends, own, strict=True):
        i = None if end is None else at[end[1]]
        if end is not None and i is not None and beside[end[0]] < len(names):
            i = i if x.shape and x.shape == leaves[i].shape else None
        found.append(i)
    return found


def with_zeros(grads: Sequence[Any], skipped: Sequence[int], params: Sequence[Any]) -> list[Any]:
    """The gradients of all parameters: zeros for the skipped ones, in their ascending order."""
    found = list(grads)
    for i in skipped:
        found.insert(i, jnp.zeros(params[i].shape, params[i].dtype))
    return found


def keep_of(of: Sequence[int | None], skipped: Collection[int], new: Any, old: Any) -> Any:
    """`new`, but `old` for what belongs to skipped parameters; `of` is that of each leaf."""
    leaves, structure = jax.tree.flatten(new)
    pairs = zip(of, leaves, jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(structure, [y if i in skipped else x for i, x, y in pairs])
