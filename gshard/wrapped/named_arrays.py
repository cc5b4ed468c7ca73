"""State dicts: full logical arrays by dotted name, and how they are written into a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import check_unique, flatten
from gshard._util.validation import shown
from gshard.sharding.host_arrays import to_host
from gshard.sharding.layout import Layout

NamedArrays = dict[str, tuple[jax.Array, Layout]]  # arrays as stored


def name_arrays(*pairs: tuple[Any, Any]) -> NamedArrays:
    """Returns stored arrays with their layouts, by dotted path.

    Args:
      *pairs: trees of arrays, each with the tree of their layouts.

    Raises:
      GShardError: two paths have the same name.
    """
    found = [
        (path.replace("/", "."), (x, place))
        for tree, layouts in pairs
        for path, x, place in zip(*flatten(tree)[:2], jax.tree.leaves(layouts), strict=True)
    ]
    check_unique([name for name, _ in found], "names of the state dict")
    return dict(found)


def full_values(stored: NamedArrays) -> dict[str, np.ndarray]:
    """Returns the logical values, gathered one after the other; for a PRNG key, its data."""
    return {name: _data(to_host(x, place)) for name, (x, place) in stored.items()}


def _data(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check(values: Any, stored: NamedArrays, what: str) -> tuple[list[str], list[str]]:
    """Returns the names that a state dict lacks, and its names that are not known.

    Args:
      values: arrays by name.
      stored: the arrays to set.
      what: the state dict's name in messages.

    Raises:
      GShardError: `values` is not a state dict, or a value has another shape.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise GShardError(f"{what}: {shown(values)} is not a state dict, a mapping from names.")
    wrong = []
    for name, (x, place) in stored.items():
        if name not in values:
            continue
        shape = jax.random.key_data(x).shape if _is_key(x) else place.shape
        if says := misfit(values[name], shape, x.dtype):
            wrong.append(f"{name} {says}")
    if wrong:
        raise GShardError(f"{what}: {some(wrong, most=3)}. Nothing was changed.")
    return [name for name in stored if name not in values], [n for n in values if n not in stored]


def misfit(value: Any, shape: tuple[int, ...], dtype: Any) -> str:
    """Says why a value cannot replace an array of this shape and dtype; empty if it can."""
    value = np.asarray(value)
    if not (jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_):
        return "is no array of numbers"
    if np.iscomplexobj(value) and not jnp.issubdtype(dtype, np.complexfloating):
        return "is complex"
    return "" if value.shape == shape else f"has shape {value.shape}, and {shape} is wanted"


def differences(missing: list[str], unknown: list[str], whose: str) -> str:
    """Describes what `check` returned, for a message; empty if nothing differs."""
    told = [("it lacks", missing), (f"{whose} does not know", unknown)]
    return "; ".join(f"{words} {some(names)}" for words, names in told if names)


def set_model(model: Any, values: Any, stored: NamedArrays) -> tuple[list[str], list[str]]:
    """Sets the arrays that both have; a warning lists the others.

    Returns:
      Names that the state dict lacks, and names that the model does not know.

    Raises:
      GShardError: a value has another shape; nothing is changed.
    """
    missing, unknown = check(values, stored, "set_state_dict")
    write(model, values, stored)
    if strange := differences(missing, unknown, "the model"):
        warn(f"set_state_dict: {strange}.")
    return missing, unknown


def check_optimizer(values: Any, stored: NamedArrays) -> None:
    """Raises a `GShardError` unless the state dict has exactly the optimizer's arrays."""
    found = check(values, stored, "set_state_dict of the optimizer")
    if strange := differences(*found, "this optimizer"):
        raise GShardError(
            f"set_state_dict: the state is another optimizer's: {strange}. Nothing was changed."
        )


def write(target: Any, values: Mapping[str, Any], stored: NamedArrays) -> None:
    """Sets Variables of a model or an optimizer one by one, in their layouts.

    `stored` is emptied, so that at most one value exists twice at a time.
    """
    at = {id(_value(x)): (path, x) for path, x in nnx.to_flat_state(nnx.state(target))}
    for name in list(stored):
        old, place = stored.pop(name)
        if name in values:
            path, variable = at.pop(id(old))
            new = _like(old, place, np.asarray(values[name]))
            if isinstance(variable, nnx.Variable):
                variable.set_value(new)
            else:  # an array that is no Variable
                nnx.update(target, nnx.from_flat_state({path: new}))


def _value(x: Any) -> Any:
    return x.get_value() if isinstance(x, nnx.Variable) else x


def _like(old: Any, place: Layout, value: np.ndarray) -> jax.Array:
    if _is_key(old):
        data = jax.device_put(value.astype(np.uint32), jax.random.key_data(old).sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    host = place.pad(value.astype(old.dtype))
    return jax.make_array_from_callback(
        old.shape, old.sharding, lambda index: np.array(host[index])
    )
