"""Each device's own part of the parameters: taken before an update, published after it.

Global arrays in the layouts of `plan.grads`; the publish stage makes whole again what rests whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gshard._util.pytree import same_leaves
from gshard.sharding.layout import Layout
from gshard.train.comm.collectives import all_gather_updated, local_shard

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


def local_shards(
    params: Any, master: dict[str, jax.Array], plan: Plan
) -> tuple[list[jax.Array], Any]:
    """What a device updates of every parameter: a global array of logical shape.

    Its part of the master copy; where there is none, or it is not what the parameter was rounded
    from, its part of the parameter, in the master's dtype.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    structure = same_leaves(params, (layout.path for layout in stored), "the parameters are")
    leaves = [
        layout.as_stored(x, "the parameters")
        for x, layout in zip(jax.tree.leaves(params), stored, strict=True)
    ]

    def take(xs: list[jax.Array], places: list[Layout]) -> list[jax.Array]:
        return [local_shard(x, place) for x, place in zip(xs, places, strict=True)]

    leaves = _where_layouts_differ(take, leaves, stored, reduced, reduced, plan)
    for i, layout in enumerate(reduced):
        if layout.path in plan.master:
            low = leaves[i]
            leaves[i] = low.astype(plan.master[layout.path].dtype)
            if layout.path in master:  # where the parameter was replaced, it counts
                copy = master[layout.path]
                leaves[i] = jnp.where(copy.astype(low.dtype) == low, copy, leaves[i])
    return [layout.unpad(x) for x, layout in zip(leaves, reduced, strict=True)], structure


def all_gather_params(tree: Any, plan: Plan, bucket_size: int, into: Any = None) -> Any:
    """Own parts, in storage, as the parameters lie: gathered where these are whole.

    Args:
      tree: like the parameters, divided as their gradients.
      plan: how all lie.
      bucket_size: elements of a bucket.
      into: the parameters that these replace, whose memory may be used.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    leaves, structure = jax.tree.flatten(tree)

    def gather(
        xs: list[jax.Array], places: list[Layout], old: Sequence[jax.Array] = ()
    ) -> list[jax.Array]:
        return all_gather_updated(xs, places, bucket_size, into=old)

    old = () if into is None else (jax.tree.leaves(into),)
    leaves = _where_layouts_differ(gather, leaves, reduced, stored, reduced, plan, *old)
    return jax.tree.unflatten(structure, leaves)


def _where_layouts_differ(
    fun: Callable[..., list[jax.Array]],
    leaves: list[jax.Array],
    before: Sequence[Layout],
    after: Sequence[Layout],
    places: Sequence[Layout],
    plan: Plan,
    *others: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs `fun` on every device's parts of the leaves whose layout changes.

    `others` are as many leaves again, which lie as after; `fun` is given theirs too.
    """
    moved = [i for i, (b, a) in enumerate(zip(before, after, strict=True)) if b.dim != a.dim]
    if moved:
        specs = [after[i].spec for i in moved]
        results = jax.shard_map(
            lambda xs, *more: fun(xs, [places[i].local() for i in moved], *more),
            mesh=plan.mesh,
            in_specs=([before[i].spec for i in moved], *(specs for _ in others)),
            out_specs=specs,
            check_vma=False,
        )([leaves[i] for i in moved], *([x[i] for i in moved] for x in others))
        for i, result in zip(moved, results, strict=True):
            leaves[i] = result
    return leaves


def held(tree: Any, layouts: Any, plan: Plan) -> Any:
    """Logical values, held to their layout; what moves for that is counted here."""
    return cut(plan.pin(tree, layouts), layouts)


def cut(tree: Any, layouts: Any) -> Any:
    """Stored values of logical shape."""
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(layouts)
    return jax.tree.unflatten(
        structure, [place.unpad(x) for x, place in zip(leaves, places, strict=True)]
    )
