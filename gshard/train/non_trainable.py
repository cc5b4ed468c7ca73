"""Non-trainable state, which a loss may read and change: frozen parameters, batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import warn
from gshard._util.pytree import flatten, map_leaves, same_leaves
from gshard.sharding.layout import Layout, all_replicated
from gshard.sharding.padded_storage import warn_of_padding
from gshard.sharding.plan import Plan
from gshard.sharding.precision import is_floating
from gshard.train.comm.collectives import gather
from gshard.train.fsdp.gather_bucket import GatherSpec, gather_specs
from gshard.train.optim.offload import to_device
from gshard.train_state import COLLECTIONS, FROZEN, PARAMETERS

PURPOSE = "non_trainable"  # the purpose under which a budget counts these all-gathers


def non_trainable_layouts(non_trainable: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns the layouts of non-trainable state; what the plan does not know is replicated."""
    layouts = {}
    for name, tree in non_trainable.items():
        layouts[name] = plan.non_trainable.get(name)
        if layouts[name] is None:
            warn_of_padding(jax.tree.leaves(tree), name)
            layouts[name] = all_replicated(tree, plan.group)
        structure = same_leaves(tree, flatten(layouts[name])[0], f"{name} is")
        # In the user's containers: a FrozenDict may stand where the plan has a dict.
        layouts[name] = structure.unflatten(jax.tree.leaves(layouts[name]))
    return layouts


def to_storage(
    non_trainable: dict[str, Any], layouts: dict[str, Any], plan: Plan
) -> dict[str, Any]:
    """Pads non-trainable state to storage shapes and casts frozen parameters to compute dtypes."""

    def padded(x: Any, layout: Layout) -> Any:
        return x if layout.dim is None else layout.as_stored(x, "the state")

    stored = map_leaves(padded, non_trainable, layouts)
    if FROZEN in stored and plan.precision is not None:
        for path, x in stored[FROZEN].items():
            dtype = plan.precision.compute(path) if is_floating(x.dtype) else x.dtype
            if x.dtype != dtype:
                stored[FROZEN][path] = to_device(x, layouts[FROZEN][path]).astype(dtype)
    return stored


def warn_of_lost_updates(aux: Any, non_trainable: dict[str, Any], mutable: Collection[str]) -> None:
    """Warns of new values of the state in `aux`, such as batch statistics, which a step drops."""
    # A field that is one array may be among the metrics under its name.
    fields = {
        name: tree
        for name, tree in non_trainable.items()
        if isinstance(tree, Mapping) and name not in (*mutable, *PARAMETERS)
    }

    def returned(name: Any, tree: Any) -> set[str]:
        """The fields of which `tree`, which aux has under this name, has new values."""
        if isinstance(tree, Mapping):
            own = {
                x
                for x, old in fields.items()
                if (x == name or x in COLLECTIONS) and _are_alike(tree, old, x == name)
            }
            return own.union(*(returned(key, x) for key, x in tree.items()))
        items = tree if isinstance(tree, (tuple, list)) else ()
        return set[str]().union(*(returned("", x) for x in items))

    for name in sorted(returned("", aux)) if fields else ():
        warn(
            f"the loss returns {name!r} in aux, and the state has a field of this name, which "
            f"keeps its old value. To change it, pass mutable={name!r} and return "
            f"(loss, {{{name!r}: new}}), or (loss, (aux, {{{name!r}: new}})) with has_aux=True."
        )


def _are_alike(tree: Any, field: Any, same_name: bool) -> bool:
    """Whether a tree is one of new values of a field of the state.

    Under another name, metrics may have the keys of the field by chance.
    """
    (paths, new, _), (known, old, _) = flatten(tree), flatten(field)
    if paths != known or same_name:
        return paths == known
    ranks = [jnp.ndim(x) for x in old]
    return any(ranks) and ranks == [*map(jnp.ndim, new)]


def pin_updates(updates: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Constrains the non-trainable state that the loss changed to the layouts of the plan."""
    return {
        name: plan.pin(tree, plan.non_trainable[name]) if name in plan.non_trainable else tree
        for name, tree in updates.items()
    }


def non_trainable_uses(
    layouts: dict[str, Any], reshard: bool | int = True
) -> list[GatherSpec | None]:
    """Returns one spec per leaf, None for a replicated one; `reshard` as in `GatherSpec`."""
    found = jax.tree.leaves(layouts)
    return gather_specs(found, found, PURPOSE, reshard=reshard)


def split_sharded(
    non_trainable: dict[str, Any], layouts: dict[str, Any]
) -> tuple[dict[int, jax.Array], Callable[[dict[int, jax.Array]], dict[str, Any]]]:
    """Returns the sharded leaves by position, and what rebuilds the tree with other ones."""
    leaves, structure = jax.tree.flatten(non_trainable)
    sharded = {i: leaves[i] for i, x in enumerate(jax.tree.leaves(layouts)) if x.dim is not None}

    def rebuild(shards: dict[int, jax.Array]) -> dict[str, Any]:
        return jax.tree.unflatten(structure, [shards.get(i, x) for i, x in enumerate(leaves)])

    return sharded, rebuild


def all_gather_tree(tree: Any, layouts: Any) -> Any:
    """All-gathers one tree of non-trainable state, for a loss that changes it."""

    def full(x: jax.Array, layout: Layout) -> jax.Array:
        x = gather(x, layout, PURPOSE)
        return x if layout.kept is None else gather(x, layout.over_kept_axis(), "agree")

    return map_leaves(full, tree, layouts)
