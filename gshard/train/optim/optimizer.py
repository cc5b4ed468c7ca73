"""The plan-aware optimizer: an optax transformation around the user's own.

It takes each device's own part of the parameters, runs the user's transformation in the global view
on logical shapes (so that norms, factored moments and matrix products are those of one device),
pins every layout, and publishes the update where parameters are whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from gshard._util.errors import GShardError
from gshard._util.jaxpr import JIT, bind, body_of, evaluate, in_scope
from gshard._util.pytree import flatten, same_leaves
from gshard.sharding.plan import Plan, ShardedTransformation
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.local_gradients import refuse_local_gradients
from gshard.train.optim.matrix_products import with_gathered_operands
from gshard.train.optim.offload import at_rest, fetched, sizes_at_once, streamed
from gshard.train.optim.param_shards import all_gather_params, cut, held, local_shards
from gshard.train_state.opt_state import ShardedOptState


def shard_optimizer(plan: Plan) -> ShardedTransformation:
    """Wraps the plan's `tx` so that it follows the plan in the user's own loop.

    The updates come back as the parameters lie (whole at `dp`, `os` and `os_g`), so that
    `optax.apply_updates` keeps every layout.
    """
    tx = plan.tx

    def init(params: Any) -> ShardedOptState:
        params = fetched(plan.kind.trained(params), plan.params)
        own, structure = local_shards(params, {}, plan)
        own = jax.tree.unflatten(structure, own)
        state = ShardedOptState.new(plan.pin(tx.init(own), plan.opt_state), _master(own, plan))
        return at_rest(state, plan.layouts.opt_state, plan)

    def update(
        updates: Any, state: ShardedOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedOptState]:
        refuse_local_gradients(updates, [layout.path for layout in jax.tree.leaves(plan.grads)])
        if params is None:
            raise GShardError("update(grads, opt_state) needs the parameters too: pass params.")
        grads, trained = plan.kind.trained(updates), plan.kind.trained(params)
        # With a master copy the new value is what must be published: their sum would be rounded.
        copied = [layout.path in plan.master for layout in jax.tree.leaves(plan.grads)]
        whole = [layout.dim is None for layout in jax.tree.leaves(plan.params)]
        late = [c and w for c, w in zip(copied, whole, strict=True)]

        def on_device(state: ShardedOptState, trained: Any) -> tuple[Any, ShardedOptState]:
            changes, state, own = _update_own(tx, plan, grads, state, trained, extra)
            new, state = _computed(optax.apply_updates(own, changes), state, plan)
            moved = plan.pin(_choose(copied, new, changes), plan.grads)
            early = [c and not w for c, w in zip(copied, whole, strict=True)]
            return _differences(early, moved, trained), state

        moved, state = streamed(on_device, state, trained, plan)
        moved = all_gather_params(moved, plan, BUCKET_SIZE)
        return plan.kind.full_update(_differences(late, moved, trained), params), state

    made = ShardedTransformation(init, update)  # pyright: ignore[reportArgumentType]
    made.plan, made.fetch_sizes = plan, partial(_fetch_sizes, plan)
    return made


def update_and_all_gather(
    plan: Plan,
    grads: Any,
    state: ShardedOptState,
    params: Any,
    extra: dict[str, Any],
    updates: jax.Array | None,
    bucket_size: int,
) -> tuple[Any, ShardedOptState]:
    """The update and publish stages: new parameters and optimizer state.

    Where `updates` is false both stay what they were.

    `extra` is handed to transformations that want it, such as the loss (`value=`), as
    `reduce_on_plateau` does. Publishes the new parameters and not the update, which would be whole
    on every device for a while, beside them.
    """
    update = _update(plan, grads, extra, updates)
    new, after = streamed(update, state, params, plan)
    return all_gather_params(new, plan, bucket_size, into=params), after


def _update(
    plan: Plan, grads: Any, extra: dict[str, Any], updates: jax.Array | None
) -> Callable[..., Any]:
    """A function of the state and the parameters on the device: new own parts, new state."""

    def on_device(state: ShardedOptState, params: Any) -> tuple[Any, ShardedOptState]:
        changes, after, own = _update_own(plan.tx, plan, grads, state, params, extra, updates)
        new = optax.apply_updates(own, changes)
        if updates is not None:
            new = keep_unless(updates, new, own)
        new, after = _computed(new, after, plan)
        return plan.pin(new, plan.grads), after

    return on_device


def _fetch_sizes(plan: Plan) -> tuple[int, ...]:
    """What an update of a train step fetches from the host: bytes on one device, by group."""
    found: list[int] = []

    def trace(grads: Any, loss: Any, updates: Any, state: ShardedOptState, params: Any) -> None:
        update = _update(plan, grads, {"value": loss}, updates)
        found.extend(sizes_at_once(update, state, params, plan))

    parts = plan.abstract_components()
    grads = jax.tree.map(plan.abstract, plan.grads)
    numbers = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_))
    jax.eval_shape(trace, grads, *numbers, parts.opt_state, parts.params)
    return tuple(found)


def _computed(new: Any, state: ShardedOptState, plan: Plan) -> tuple[Any, ShardedOptState]:
    """New own parts in the dtypes that are computed with, and the state with new master copies."""
    state = state._replace(master=_master(new, plan))
    dtypes = (layout.dtype for layout in jax.tree.leaves(plan.params))
    leaves, structure = jax.tree.flatten(new)
    leaves = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, leaves), state


def _master(own: Any, plan: Plan) -> dict[str, jax.Array]:
    """Those own parts that are master copies, in storage."""
    leaves = dict(zip(*flatten(own)[:2], strict=True))
    return plan.pin({path: leaves[path] for path in plan.master}, plan.master)


def _choose(first: Sequence[bool], xs: Any, ys: Any) -> Any:
    """A tree like `ys`, with the leaves of `xs` where `first` says so."""
    leaves, structure = jax.tree.flatten(ys)
    pairs = zip(first, jax.tree.leaves(xs), leaves, strict=True)
    return jax.tree.unflatten(structure, [x if one else y for one, x, y in pairs])


def _differences(chosen: Sequence[bool], new: Any, old: Any) -> Any:
    """`new`, or what makes `old` into it, in a dtype in which their sum is that again."""

    def difference(x: jax.Array, y: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return x.astype(wide) - y.astype(wide)

    leaves, structure = jax.tree.flatten(new)
    triples = zip(chosen, leaves, jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(structure, [difference(x, y) if c else x for c, x, y in triples])


def _update_own(
    tx: optax.GradientTransformation,
    plan: Plan,
    grads: Any,
    state: ShardedOptState,
    params: Any,
    extra: dict[str, Any],
    updates: jax.Array | None = None,
) -> tuple[Any, ShardedOptState, Any]:
    """Runs `tx` on every device's own part, in the global view and on logical shapes.

    Where `updates` is false the state stays what it was.

    Returns:
      Updates, the new state (in storage) and the parameters' own parts.
    """
    reduced = jax.tree.leaves(plan.grads)
    structure = same_leaves(grads, (layout.path for layout in reduced), "the gradients are")
    logical = [
        layout.unpad(layout.as_stored(g, "the gradients"))
        for g, layout in zip(jax.tree.leaves(grads), reduced, strict=True)
    ]
    own, params_structure = local_shards(params, state.master, plan)
    if plan.precision is not None:  # the optimizer computes in the dtype of what it updates
        logical = [g.astype(x.dtype) for g, x in zip(logical, own, strict=True)]
    own = jax.tree.unflatten(params_structure, own)
    results = [*reduced, *jax.tree.leaves(plan.opt_state)]
    with jax.named_scope("gshard/optimizer"):  # what XLA puts in for it counts as its own
        inner = held(cut(state.inner, plan.opt_state), plan.opt_state, plan)
        arguments = (jax.tree.unflatten(structure, logical), inner, own)
        update = user_update(tx, plan, extra)
        if updates is not None:
            update = guarded(update, updates)
        changes, inner = with_gathered_operands(
            update, plan, arguments, [*results, *reduced], results
        )
        changes = held(changes, plan.grads, plan)
        inner = plan.pin(inner, plan.opt_state)
    return changes, state._replace(inner=inner), own


def user_update(
    tx: optax.GradientTransformation, plan: Plan, extra: dict[str, Any]
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`tx.update` of gradients, state and parameters, with those of `extra` that it takes."""
    accepted = _accepted(tx, extra)

    def update(grads: Any, inner: Any, own: Any) -> tuple[Any, Any]:
        try:
            updates, inner = tx.update(grads, inner, own, **accepted)
        except (TypeError, ValueError) as error:
            _explain(error)
            raise
        _check_results(updates, inner, plan)
        return updates, inner

    return update


def _accepted(tx: optax.GradientTransformation, extra: dict[str, Any]) -> dict[str, Any]:
    """Those extra arguments that the update takes; optax's own mostly take any."""
    parameters = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return extra
    return {name: value for name, value in extra.items() if name in {p.name for p in parameters}}


def _check_results(updates: Any, inner: Any, plan: Plan) -> None:
    """Refuses an optimizer's results that are not the trees, or not of the shapes, of the plan."""
    for tree, layouts, name in (
        (updates, plan.grads, "the updates that the optimizer returns are"),
        (inner, plan.opt_state, "the state that the optimizer returns is"),
    ):
        places = jax.tree.leaves(layouts)
        same_leaves(tree, (place.path for place in places), name)
        for x, place in zip(jax.tree.leaves(tree), places, strict=True):
            if jnp.shape(x) != place.shape:
                raise GShardError(
                    f"{name} not of the plan's shapes: {place.path} has {jnp.shape(x)}, not "
                    f"{place.shape}. Return an array of its shape for every leaf."
                )


def _explain(error: Exception) -> None:
    """Puts an optimizer's demand for more than a train step has in gshard's words."""
    said = str(error)
    if "batch dimension" in said:
        raise GShardError(
            "the optimizer wants one gradient for each example, and a train step has their mean: "
            f"{said}"
        ) from error
    if "required keyword-only argument" in said or "must be provided" in said:
        raise GShardError(
            f"the optimizer needs more than gradients and parameters: {said}. make_train_step "
            "gives it value= (the loss); pass what else it needs in your own loop: "
            "state.tx.update(grads, state.opt_state, state.params, ...)."
        ) from error


def keep_unless(updates: jax.Array, new: Any, old: Any) -> Any:
    """The new values where a step updates, else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(updates, x, y), new, old)


def guarded(
    update: Callable[[Any, Any, Any], tuple[Any, Any]], updates: jax.Array
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`update(grads, state, params)` of an optimizer whose state stays where `updates` is false.

    What it makes of the parameters is to be kept by the caller. Every new leaf of the state is
    chosen where it arises, so that what follows from it reads the one that is kept. Chosen at the
    end, both would be alive with the old one, and the state could not be changed in place.
    """

    def kept(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        args = (grads, state, params)
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
        old = [None] * len(jax.tree.leaves(shapes[0])) + jax.tree.leaves(state)
        results = _choosing(closed.jaxpr, closed.consts, jax.tree.leaves(args), old, updates)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return kept


def _choosing(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], old: Sequence[Any], updates: jax.Array
) -> list[Any]:
    """Results of a jaxpr; those with an old value (not None) keep it where `updates` is false.

    The choice is made where the result is computed, or at the end where that cannot be.
    """
    due = {v: x for v, x in zip(jaxpr.outvars, old, strict=True) if not isinstance(v, Literal)}
    chosen: dict[Any, Any] = {}  # the old value by variable

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        # What follows was traced for the dtype of the new one.
        wanted = {v: x for v in eqn.outvars if (x := due.get(v)) is not None}
        wanted = {v: x for v, x in wanted.items() if x.dtype == v.aval.dtype}
        chosen.update(wanted)
        if eqn.primitive.name == JIT:
            return _choosing(*body_of(eqn), values, [wanted.get(v) for v in eqn.outvars], updates)
        with in_scope(eqn):
            return [
                keep_unless(updates, new, wanted[v]) if v in wanted else new
                for v, new in zip(eqn.outvars, bind(eqn, values), strict=True)
            ]

    return [
        new
        if x is None or (not isinstance(v, Literal) and chosen.get(v) is x)
        else keep_unless(updates, new, x)
        for v, x, new in zip(jaxpr.outvars, old, evaluate(jaxpr, consts, inputs, run), strict=True)
    ]
