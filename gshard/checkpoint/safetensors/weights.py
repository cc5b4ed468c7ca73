"""The weights of a state by name: its parameters, and the collections beside them.

A weight is called by its path, joined by `.`: the same at every level, on every mesh, with every
precision. Optimizer state is no weight, nor is what random numbers are drawn from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten, same_leaves
from gshard.checkpoint.safetensors.format import METADATA
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.sharding.validate import refuse_donated
from gshard.train_state import Components


class Weight(NamedTuple):
    """One array in storage, the master copy where there is one, and how it lies."""

    array: Any
    layout: Layout


def name_of(layout: Layout) -> str:
    """What a weight is called in a file."""
    return layout.path.replace("/", ".")


def weights_of(parts: Components, plan: Plan, call: str) -> dict[str, Weight]:
    """The weights of a state by name.

    Raises:
      GShardError: the state is abstract, or not the tree or of the shapes and dtypes of its plan;
        or two weights would have one name.
    """
    for tree, known in ((parts.params, plan.params), (parts.non_trainable, plan.non_trainable)):
        same_leaves(tree, flatten(known)[0], f"{call}: the state is")
    leaves = jax.tree.leaves((parts.params, parts.non_trainable, parts.opt_state))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise GShardError(
            f"{call}: the state is abstract, it has no values. Pass one that was divided over "
            "devices."
        )
    refuse_donated(leaves)
    params, layouts = plan.master_params(parts.params, parts.opt_state)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(layouts), strict=True)
    found = [Weight(x, layout) for x, layout in pairs]
    beside = zip(
        jax.tree.leaves(parts.non_trainable), jax.tree.leaves(plan.non_trainable), strict=True
    )
    random = plan.kind.random_paths(plan.template)
    found += [Weight(x, layout) for x, layout in beside if _is_weight(layout, random)]
    _refuse_other_forms(found, call)
    return _by_name(found, call)


def replaced(parts: Components, plan: Plan, make: Callable[[str, Layout], jax.Array]) -> Components:
    """Parts whose weights are what `make(name, layout)` says, master copies too."""
    random = plan.kind.random_paths(plan.template)

    def all_of(tree: Any, layouts: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        places = jax.tree.leaves(layouts)
        new = [
            make(name_of(place), place) if _is_weight(place, random) else x
            for x, place in zip(leaves, places, strict=True)
        ]
        return jax.tree.unflatten(structure, new)

    master = {path: make(name_of(place), place) for path, place in plan.master.items()}
    return dataclasses.replace(
        parts,
        params=all_of(parts.params, plan.params),
        opt_state=parts.opt_state._replace(master=master),
        non_trainable=all_of(parts.non_trainable, plan.non_trainable),
    )


def _is_weight(layout: Layout, random: frozenset[str]) -> bool:
    is_key = jnp.issubdtype(layout.dtype, jax.dtypes.prng_key)
    return not is_key and layout.path not in random


def _refuse_other_forms(weights: list[Weight], call: str) -> None:
    wrong = [
        f"{layout.path} is {x.dtype}{list(x.shape)}, stored as "
        f"{layout.dtype}{list(layout.stored_shape)}"
        for x, layout in weights
        if hasattr(x, "dtype") and (x.dtype != layout.dtype or x.shape != layout.stored_shape)
    ]
    if wrong:
        raise GShardError(
            f"{call}: the state is not as its plan lays it out: {some(wrong, most=3)}. Pass what "
            "gshard.shard_train_state or a step returned."
        )


def _by_name(weights: list[Weight], call: str) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for weight in weights:
        name = name_of(weight.layout)
        if name in found:
            raise GShardError(
                f"{call}: {found[name].layout.path} and {weight.layout.path} would both be called "
                f"{name!r} in the file. Rename one of them."
            )
        if name == METADATA:
            raise GShardError(f"{call}: a safetensors file keeps {name!r} for itself. Rename it.")
        found[name] = weight
    return found
