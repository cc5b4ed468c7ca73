"""State dicts: logical whole values by dotted name, at every level, and back to their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.arguments import shown
from gshard.errors import GShardError, some
from gshard.host import to_host
from gshard.layout import Layout
from gshard.tree import flatten

Named = dict[str, tuple[jax.Array, Layout]]  # arrays as stored


def named(tree: Any, layouts: Any) -> Named:
    """Stored arrays with their layouts, by dotted path; PRNG keys are left out."""
    paths, leaves, _ = flatten(tree)
    places = jax.tree.leaves(layouts)
    return {
        path.replace("/", "."): (x, place)
        for path, x, place in zip(paths, leaves, places, strict=True)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }


def whole_values(stored: Named) -> dict[str, np.ndarray]:
    """Their logical values, gathered one after the other."""
    return {name: to_host(x, place) for name, (x, place) in stored.items()}


def in_places(values: Any, stored: Named, what: str) -> tuple[Named, list[str], list[str]]:
    """Values of a state dict as stored arrays, each where the one it replaces lies.

    Args:
      values: arrays by name.
      stored: what they are for.
      what: how a message calls the state dict.

    Returns:
      The new arrays, names that have no value, and names that are not known.

    Raises:
      GShardError: for a value of another shape; nothing is changed.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise GShardError(f"{what}: {shown(values)} is not a state dict, a mapping from names.")
    arrays = {name: np.asarray(values[name]) for name in stored.keys() & values.keys()}
    wrong = [
        f"{name} has shape {arrays[name].shape}, and {stored[name][1].shape} is wanted"
        for name in stored
        if name in arrays and arrays[name].shape != stored[name][1].shape
    ]
    kinds = [name for name in stored if name in arrays and arrays[name].dtype.kind in "OSU"]
    wrong += [f"{name} is no array of numbers" for name in kinds]
    if wrong:
        raise GShardError(f"{what}: {some(wrong, most=3)}. Nothing was changed.")
    new = {name: (_stored(x, *stored[name]), stored[name][1]) for name, x in arrays.items()}
    missing = [name for name in stored if name not in values]
    return new, missing, [name for name in values if name not in stored]


def _stored(value: np.ndarray, like: jax.Array, place: Layout) -> jax.Array:
    host = place.pad(value.astype(like.dtype))
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(host[index])
    )
