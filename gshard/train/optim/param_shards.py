"""Each device's shards of the parameters: taken before an update, all-gathered after it.

The shards are global arrays in the layouts of `plan.grads`. Parameters that are stored replicated
are all-gathered from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.pytree import map_leaves, same_leaves
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import all_gather_updated, local_shard


def local_shards(
    params: Any, master: dict[str, jax.Array], plan: Plan
) -> tuple[list[jax.Array], Any]:
    """Returns the shards that the devices update, as global arrays of logical shape.

    For each parameter this is its master copy. If there is none, or the parameter was replaced
    after it was rounded from the copy, it is the parameter in the dtype of the master copy.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    structure = same_leaves(params, (layout.path for layout in stored), "the parameters are")
    leaves = map_leaves(lambda p, x: p.as_stored(x, "the parameters"), stored, params)

    def take(xs: list[jax.Array], layouts: list[Layout]) -> list[jax.Array]:
        return [local_shard(x, layout) for x, layout in zip(xs, layouts, strict=True)]

    leaves = _where_layouts_differ(take, leaves, stored, reduced, reduced, plan)
    for i, layout in enumerate(reduced):
        if layout.path in plan.master:
            low = leaves[i]
            leaves[i] = low.astype(plan.master[layout.path].dtype)
            if layout.path in master:  # a parameter that was replaced takes precedence
                copy = master[layout.path]
                leaves[i] = jnp.where(copy.astype(low.dtype) == low, copy, leaves[i])
    return cut_padding(leaves, reduced), structure


def all_gather_params(tree: Any, plan: Plan, bucket_size: int, into: Any = None) -> Any:
    """All-gathers updated shards, in the layouts of the gradients, of replicated parameters.

    `into` are the parameters that these replace, whose memory may be used.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    leaves, structure = jax.tree.flatten(tree)

    def gather(
        xs: list[jax.Array], layouts: list[Layout], old: Sequence[jax.Array] = ()
    ) -> list[jax.Array]:
        return all_gather_updated(xs, layouts, bucket_size, into=old)

    old = () if into is None else (jax.tree.leaves(into),)
    leaves = _where_layouts_differ(gather, leaves, reduced, stored, reduced, plan, *old)
    return jax.tree.unflatten(structure, leaves)


def _where_layouts_differ(
    fun: Callable[..., list[jax.Array]],
    leaves: list[jax.Array],
    before: Sequence[Layout],
    after: Sequence[Layout],
    sharded: Sequence[Layout],
    plan: Plan,
    *others: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs `fun` on every device's shards of the leaves whose layout changes.

    `others` are lists of as many leaves in the layouts `after`, which `fun` is given too.
    """
    moved = [i for i, (b, a) in enumerate(zip(before, after, strict=True)) if b.dim != a.dim]
    if moved:
        specs = [after[i].spec for i in moved]
        results = jax.shard_map(
            lambda xs, *more: fun(xs, [sharded[i].local() for i in moved], *more),
            mesh=plan.mesh,
            in_specs=([before[i].spec for i in moved], *(specs for _ in others)),
            out_specs=specs,
            check_vma=False,
        )([leaves[i] for i in moved], *([x[i] for i in moved] for x in others))
        for i, result in zip(moved, results, strict=True):
            leaves[i] = result
    return leaves


def constrain_logical(tree: Any, layouts: Any, plan: Plan) -> Any:
    """Constrains logical values to their layouts; resharding counts as the optimizer's."""
    return cut_padding(plan.pin(tree, layouts), layouts)


def cut_padding(tree: Any, layouts: Any) -> Any:
    """Removes the padding of stored arrays."""
    return map_leaves(lambda x, layout: layout.unpad(x), tree, layouts)
