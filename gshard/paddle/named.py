"""State dicts: logical whole values by dotted name, at every level, and back to their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def check(values: Any, stored: Named, what: str) -> tuple[list[str], list[str]]:
    """Names that a state dict lacks, and names that are not known.

    Args:
      values: arrays by name.
      stored: what they are for.
      what: how a message calls the state dict.

    Raises:
      GShardError: for no state dict, or a value of another shape.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise GShardError(f"{what}: {shown(values)} is not a state dict, a mapping from names.")
    wrong = []
    for name, (_, place) in stored.items():
        if name not in values:
            continue
        value = np.asarray(values[name])
        if not (jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_):
            wrong.append(f"{name} is no array of numbers")
        elif value.shape != place.shape:
            wrong.append(f"{name} has shape {value.shape}, and {place.shape} is wanted")
    if wrong:
        raise GShardError(f"{what}: {some(wrong, most=3)}. Nothing was changed.")
    return [name for name in stored if name not in values], [n for n in values if n not in stored]


def write(target: Any, values: Mapping[str, Any], stored: Named) -> None:
    """Sets Variables of a model or an optimizer, each where it lies, one after the other.

    `stored` is emptied, so that no more than one value is there twice.
    """
    variables = {id(x.get_value()): x for _, x in nnx.to_flat_state(nnx.state(target))}
    for name in list(stored):
        old, place = stored.pop(name)
        if name in values:
            host = place.pad(np.asarray(values[name]).astype(old.dtype))
            variables[id(old)].set_value(
                jax.make_array_from_callback(
                    old.shape, old.sharding, lambda index, host=host: np.array(host[index])
                )
            )
