"""Which leaves of an optimizer's state belong to which parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from gshard.tree import belongs_to, flatten


def parameter_of(tree: Any, names: Sequence[str]) -> list[int | None]:
    """For every leaf of a state the position of its parameter, or None where it is of all."""
    at = {name: i for i, name in enumerate(names)}
    ends = belongs_to(flatten(tree)[0], at)
    return [None if end is None else at[end[1]] for end in ends]


def keep_of(names: Sequence[str], skipped: Collection[str], new: Any, old: Any) -> Any:
    """`new`, but `old` for what belongs to the skipped ones of the parameters `names`."""
    if not skipped:
        return new
    of = parameter_of(new, names)
    leaves, structure = jax.tree.flatten(new)
    pairs = zip(of, leaves, jax.tree.leaves(old), strict=True)
    kept = [y if i is not None and names[i] in skipped else x for i, x, y in pairs]
    return jax.tree.unflatten(structure, kept)
