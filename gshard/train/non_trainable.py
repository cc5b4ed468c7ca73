"""Non-trainable state on a device, which may be sharded.

A loss may read it (frozen parameters, batch statistics, a teacher) and may return new values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard._util.pytree import flatten, same_leaves
from gshard.sharding.layout import all_replicated
from gshard.sharding.plan import Plan
from gshard.sharding.precision import is_floating
from gshard.train.comm.collectives import gather
from gshard.train.fsdp.gather_bucket import GatherSpec, gather_specs
from gshard.train.optim.offload import to_device
from gshard.train_state import FROZEN

PURPOSE = "non_trainable"  # the purpose under which a budget counts these all-gathers


def non_trainable_layouts(non_trainable: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns the layouts of non-trainable state by name; state unknown to the plan is replicated.

    Raises:
      GShardError: a tree differs from the one that the plan has under its name.
    """
    known = plan.non_trainable
    for name in non_trainable.keys() & known.keys():
        same_leaves(non_trainable[name], flatten(known[name])[0], f"{name} is")
    return {
        name: known[name] if name in known else all_replicated(tree, plan.group)
        for name, tree in non_trainable.items()
    }


def to_storage(
    non_trainable: dict[str, Any], layouts: dict[str, Any], plan: Plan
) -> dict[str, Any]:
    """Pads non-trainable state to storage shapes and casts frozen parameters to compute dtypes."""
    leaves = [
        layout.as_stored(x, "the state") if layout.dim is not None else x
        for x, layout in zip(jax.tree.leaves(non_trainable), jax.tree.leaves(layouts), strict=True)
    ]
    stored = jax.tree.unflatten(jax.tree.structure(non_trainable), leaves)
    if FROZEN in stored and plan.precision is not None:
        for path, x in stored[FROZEN].items():
            dtype = plan.precision.compute(path) if is_floating(x.dtype) else x.dtype
            if x.dtype != dtype:
                place = layouts[FROZEN][path]
                stored[FROZEN][path] = to_device(x, place).astype(dtype)
    return stored


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
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], dict[str, Any]]]:
    """Returns the sharded leaves, and a function that rebuilds the tree with other ones."""
    leaves, structure = jax.tree.flatten(non_trainable)
    places = [i for i, x in enumerate(jax.tree.leaves(layouts)) if x.dim is not None]

    def put(parts: list[jax.Array]) -> dict[str, Any]:
        new = list(leaves)
        for i, part in zip(places, parts, strict=True):
            new[i] = part
        return jax.tree.unflatten(structure, new)

    return [leaves[i] for i in places], put


def all_gather_tree(tree: Any, layouts: Any) -> Any:
    """All-gathers one tree of non-trainable state, for a loss that changes it."""
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(layouts)
    return jax.tree.unflatten(
        structure, [gather(x, place, PURPOSE) for x, place in zip(leaves, places, strict=True)]
    )
