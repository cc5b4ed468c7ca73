"""The plan-aware optimizer: an optax transformation around the user's own.

It takes each device's own part of the parameters, runs the user's transformation in the global view
on logical shapes (so that norms, factored moments and matrix products are those of one device),
pins every layout, and publishes the update where parameters are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from gshard.collectives import own_part, publish_leaves
from gshard.errors import GShardError
from gshard.layout import Layout
from gshard.plan import Plan, same_leaves


class GShardState(NamedTuple):
    """State of the plan-aware optimizer.

    Attributes:
      inner: the user's optimizer state, in the layouts of the plan.
    """

    inner: Any


class DividedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that carries the plan it follows."""

    plan: Plan


def divide(tx: optax.GradientTransformation, plan: Plan) -> DividedTransformation:
    """Wraps `tx` so that it updates a state that lies as `plan` says."""
    inner = optax.with_extra_args_support(tx)
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)

    def init(params: Any) -> GShardState:
        own, structure = _own_parts(params, stored, reduced, plan)
        state = inner.init(jax.tree.unflatten(structure, own))
        return GShardState(_pin(state, plan.opt_state, plan))

    def update(
        updates: Any, state: GShardState, params: Any = None, **extra: Any
    ) -> tuple[Any, GShardState]:
        if params is None:
            raise GShardError("update(grads, opt_state) needs the parameters too: pass params.")
        structure = same_leaves(updates, plan.params, "the gradients")
        grads = [
            layout.cut(_stored(g, layout, "the gradients"))
            for g, layout in zip(jax.tree.leaves(updates), reduced, strict=True)
        ]
        own, params_structure = _own_parts(params, stored, reduced, plan)
        inner_state = _cut(state.inner, plan.opt_state)
        new, inner_state = inner.update(
            jax.tree.unflatten(structure, grads),
            inner_state,
            jax.tree.unflatten(params_structure, own),
            **extra,
        )
        leaves = jax.tree.leaves(_pin(new, plan.grads, plan))
        leaves = _publish(leaves, stored, reduced, plan)
        return jax.tree.unflatten(structure, leaves), GShardState(
            _pin(inner_state, plan.opt_state, plan)
        )

    made = DividedTransformation(init, update)
    made.plan = plan
    return made


def _own_parts(
    params: Any, stored: Sequence[Layout], reduced: Sequence[Layout], plan: Plan
) -> tuple[list[jax.Array], Any]:
    """The part of every parameter that a device updates: a global array of logical shape."""
    structure = same_leaves(params, plan.params, "the parameters")
    leaves = [
        _stored(x, layout, "the parameters")
        for x, layout in zip(jax.tree.leaves(params), stored, strict=True)
    ]
    taken = [i for i, (s, r) in enumerate(zip(stored, reduced, strict=True)) if s.dim != r.dim]
    if taken:
        places = [reduced[i] for i in taken]
        parts = _on_devices(
            lambda xs: [own_part(x, place) for x, place in zip(xs, places, strict=True)],
            [leaves[i] for i in taken],
            [stored[i] for i in taken],
            places,
            plan,
        )
        for i, part in zip(taken, parts, strict=True):
            leaves[i] = part
    return [layout.cut(x) for x, layout in zip(leaves, reduced, strict=True)], structure


def _publish(
    leaves: list[jax.Array], stored: Sequence[Layout], reduced: Sequence[Layout], plan: Plan
) -> list[jax.Array]:
    """Gathers the updates of leaves whose parameter is whole."""
    taken = [i for i, (s, r) in enumerate(zip(stored, reduced, strict=True)) if s.dim != r.dim]
    if taken:
        places = [reduced[i] for i in taken]
        wholes = _on_devices(
            lambda xs: publish_leaves(xs, places, plan.buffer_max_size),
            [leaves[i] for i in taken],
            places,
            [stored[i] for i in taken],
            plan,
        )
        for i, whole in zip(taken, wholes, strict=True):
            leaves[i] = whole
    return leaves


def _on_devices(
    fun: Callable[[list[jax.Array]], list[jax.Array]],
    leaves: list[jax.Array],
    before: Sequence[Layout],
    after: Sequence[Layout],
    plan: Plan,
) -> list[jax.Array]:
    """Runs `fun` on every device's parts."""
    return jax.shard_map(
        fun,
        mesh=plan.mesh,
        in_specs=([layout.spec for layout in before],),
        out_specs=[layout.spec for layout in after],
        check_vma=False,
    )(leaves)


def _cut(tree: Any, layouts: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(layouts)
    return jax.tree.unflatten(
        structure, [place.cut(x) for x, place in zip(leaves, places, strict=True)]
    )


def _pin(tree: Any, layouts: Any, plan: Plan) -> Any:
    """Logical values to storage: padded, and held to their layout."""
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(layouts)
    pinned = [
        jax.lax.with_sharding_constraint(place.pad(x), plan.sharding(place))
        for x, place in zip(leaves, places, strict=True)
    ]
    return jax.tree.unflatten(structure, pinned)


def _stored(x: jax.Array, layout: Layout, what: str) -> jax.Array:
    """A leaf in storage shape; a logical one is padded."""
    if x.shape == layout.stored_shape:
        return x
    if x.shape == layout.shape:
        return layout.pad(x)
    raise GShardError(
        f"{what}: {layout.path} has shape {x.shape}; the plan has {layout.shape} (stored as "
        f"{layout.stored_shape})."
    )
