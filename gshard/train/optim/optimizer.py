"""The sharded optimizer: an optax transformation around the user's own.

It takes each device's shard of the parameters, runs the user's transformation in the global view on
logical shapes (so that norms, factored moments and matrix products match single-device training),
constrains every layout, and all-gathers the updated parameters that are stored replicated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gshard._util.arrays import cast
from gshard._util.errors import GShardError, some
from gshard._util.pytree import differences, flatten, map_leaves, same_leaves
from gshard._util.tracebacks import short_traceback
from gshard.sharding.layout import Layout, all_replicated
from gshard.sharding.master_copies import where_replaced
from gshard.sharding.plan import Plan, ShardedTransformation, UpdateProducts
from gshard.sharding.quantized_array import decoded
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.collectives import all_gather_updated, slice_shards
from gshard.train.gradients import refuse_local_gradients
from gshard.train.optim.extra_arguments import as_optimizers_see, logical_grads
from gshard.train.optim.matrix_products import with_gathered_operands
from gshard.train.optim.offload import to_device, to_host, transfer_sizes, update_through_device
from gshard.train.optim.skip_update import keep_unless
from gshard.train_state.components import ShardedOptState


def shard_optimizer(plan: Plan) -> ShardedTransformation:
    """Wraps the plan's `tx` so that it follows the plan in the user's own loop.

    The updates have the layouts of the parameters (replicated at `dp`, `os` and `os_g`), so that
    `optax.apply_updates` keeps every layout.
    """

    def init(params: Any) -> ShardedOptState:
        params = to_device(plan.kind.trained(params), plan.params)
        own, structure = local_shards(params, {}, plan)
        own = jax.tree.unflatten(structure, own)
        of_state = plan.decoded_opt_state
        inner = map_leaves(lambda p, x: jnp.asarray(x, p.dtype), of_state, plan.tx.init(own))
        inner = plan.encode(plan.pin(inner, of_state))
        state = ShardedOptState(inner, _master_copies(own, plan))
        return to_host(state, plan.layouts.opt_state, plan)

    @short_traceback
    def update(
        updates: Any, state: ShardedOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedOptState]:
        refuse_local_gradients(updates, [layout.path for layout in jax.tree.leaves(plan.grads)])
        if params is None:
            raise GShardError("update(grads, opt_state) needs the parameters too: pass params.")
        grads, trained = plan.kind.trained(updates), plan.kind.trained(params)
        extra = as_optimizers_see(extra, updates, params, plan)
        # With a master copy the new value must be all-gathered: the sum of both would be rounded.
        stored = jax.tree.leaves(plan.params)
        copied = [layout.path in plan.master for layout in stored]
        early = [layout.path in plan.master and layout.dim is not None for layout in stored]
        late = [layout.path in plan.master and layout.dim is None for layout in stored]

        def on_device(state: ShardedOptState, trained: Any) -> tuple[Any, ShardedOptState]:
            changes, state, own = _update_shards(plan, grads, state, trained, extra)
            new, state = _in_compute_dtype(optax.apply_updates(own, changes), state, plan)
            new = map_leaves(lambda x, y, c: y if c else x, changes, new, copied)
            return _differences(early, plan.pin(new, plan.grads), trained), state

        new, state = update_through_device(on_device, state, trained, plan)
        new = all_gather_params(new, plan, BUCKET_SIZE)
        return plan.kind.full_update(_differences(late, new, trained), params), state

    wrapped = ShardedTransformation(init, update)  # pyright: ignore[reportArgumentType]
    wrapped.plan, wrapped.fetch_sizes = plan, partial(_transfer_sizes, plan)
    wrapped.products = partial(_products, plan)
    return wrapped


def update_and_all_gather(
    plan: Plan,
    grads: Any,
    state: ShardedOptState,
    params: Any,
    extra: dict[str, Any],
    updates: jax.Array | None,
    bucket_size: int,
) -> tuple[Any, ShardedOptState]:
    """Updates the shards and all-gathers the new parameters; returns them and the new state.

    Where `updates` is false both keep their values. The new parameters are all-gathered and not the
    updates, which would need memory for full arrays of their own.
    """
    update = _shard_update(plan, grads, extra, updates)
    new, after = update_through_device(update, state, params, plan)
    return all_gather_params(new, plan, bucket_size, into=params), after


def _shard_update(
    plan: Plan,
    grads: Any,
    extra: dict[str, Any],
    updates: jax.Array | None,
    record: Callable[[UpdateProducts], None] | None = None,
) -> Callable[..., Any]:
    """Makes the update: a function of state and parameters that returns new shards and state."""

    def on_device(state: ShardedOptState, params: Any) -> tuple[Any, ShardedOptState]:
        changes, after, own = _update_shards(plan, grads, state, params, extra, updates, record)
        new = optax.apply_updates(own, changes)
        if updates is not None:
            new = keep_unless(updates, new, own)
        new, after = _in_compute_dtype(new, after, plan)
        return plan.pin(new, plan.grads), after

    return on_device


def _transfer_sizes(plan: Plan) -> tuple[int, ...]:
    """Returns the bytes per device of each group that a train step copies from the host."""
    found: list[int] = []

    def trace(update: Any, state: Any, params: Any) -> None:
        found.extend(transfer_sizes(update, state, params, plan))

    _trace_update(plan, trace)
    return tuple(found)


def _products(plan: Plan) -> UpdateProducts | None:
    """Returns the matrix products of an update; None if it has none."""
    found: list[UpdateProducts] = []

    def trace(update: Any, state: Any, params: Any) -> None:
        update(to_device(state, plan.layouts.opt_state), to_device(params, plan.params))

    _trace_update(plan, trace, found.append)
    return found[-1] if found else None


def _trace_update(plan: Plan, use: Callable[..., Any], record: Any = None) -> None:
    """Traces `use(update, state, params)` for the update of a train step."""

    def trace(grads: Any, loss: Any, updates: Any, state: ShardedOptState, params: Any) -> None:
        use(_shard_update(plan, grads, {"value": loss}, updates, record), state, params)

    parts = plan.abstract_components()
    grads = jax.tree.map(plan.abstract, plan.grads)
    numbers = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_))
    jax.eval_shape(trace, grads, *numbers, parts.opt_state, parts.params)


def _in_compute_dtype(new: Any, state: ShardedOptState, plan: Plan) -> tuple[Any, ShardedOptState]:
    """Casts new shards to their compute dtypes, and puts the new master copies into the state."""
    state = state._replace(master=_master_copies(new, plan))
    return map_leaves(lambda x, layout: cast(x, layout.dtype), new, plan.params), state


def _master_copies(own: Any, plan: Plan) -> dict[str, jax.Array]:
    """Returns the shards of parameters that have master copies, as stored."""
    leaves = dict(zip(*flatten(own)[:2], strict=True))
    return plan.pin({path: leaves[path] for path in plan.master}, plan.master)


def _differences(chosen: Sequence[bool], new: Any, old: Any) -> Any:
    """Returns `new`, minus `old` where chosen, in float32 or wider so that adding it is exact."""

    def difference(x: jax.Array, y: jax.Array, chosen: bool) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return x.astype(wide) - y.astype(wide) if chosen else x

    return map_leaves(difference, new, old, chosen)


def _update_shards(
    plan: Plan,
    grads: Any,
    state: ShardedOptState,
    params: Any,
    extra: dict[str, Any],
    updates: jax.Array | None = None,
    record: Callable[[UpdateProducts], None] | None = None,
) -> tuple[Any, ShardedOptState, Any]:
    """Runs `plan.tx` on every device's shards, in the global view and on logical shapes.

    Returns updates, the new state, which where `updates` is false is the old one, and the shards of
    the parameters. `record` gets what is known of its matrix products, if it has any.
    """
    reduced = jax.tree.leaves(plan.grads)
    paths, advice = (x.path for x in reduced), "Pass gradients like those of gshard.value_and_grad."
    same_leaves(grads, paths, "the gradients are", advice)
    logical = logical_grads(grads, plan)
    own, structure = local_shards(params, state.master, plan)
    if plan.precision is not None:  # the optimizer computes in the dtype of what it updates
        logical = map_leaves(lambda g, x: cast(g, x.dtype), logical, own)
    own = jax.tree.unflatten(structure, own)
    of_state = plan.decoded_opt_state
    results = [*reduced, *jax.tree.leaves(of_state)]
    with jax.named_scope("gshard/optimizer"):  # collectives that XLA inserts get this name too
        inner = cut_padding(decoded(state.inner), of_state)
        # As arguments, since an equation that reads a constant of the step has the step's mesh in
        # its type, and no matrix product in a `shard_map` takes its result.
        scalars = {k: x for k, x in extra.items() if isinstance(x, jax.Array) and not x.ndim}

        def run(grads: Any, inner: Any, own: Any, scalars: Any) -> tuple[Any, Any]:
            update = user_update(plan, {**extra, **scalars})
            return update(grads, inner, own)

        arguments = (updates, logical, inner, own, scalars)
        first, last = (jax.tree.leaves(all_replicated(x, plan.group)) for x in (updates, scalars))
        changes, inner = with_gathered_operands(
            run, plan, arguments, [*first, *results, *reduced, *last], results, record
        )
        changes = cut_padding(plan.pin(changes, plan.grads), plan.grads)
        inner = plan.encode(plan.pin(inner, of_state), state.inner)
    return changes, state._replace(inner=inner), own


def user_update(plan: Plan, extra: dict[str, Any]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Makes `plan.tx.update(grads, state, params)` with what it accepts of `extra`."""
    parameters = inspect.signature(plan.tx.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):  # most of optax accepts any
        extra = {p.name: extra[p.name] for p in parameters if p.name in extra}

    def update(grads: Any, inner: Any, own: Any) -> tuple[Any, Any]:
        try:
            updates, inner = plan.tx.update(grads, inner, own, **extra)
        except (TypeError, ValueError) as error:
            _raise_optimizer_error(error)
            _refuse_other_state(plan, error)
            raise
        except (AttributeError, LookupError) as error:
            _refuse_other_state(plan, error)
            raise
        _check_results(updates, inner, plan)
        return updates, inner

    return update


def _check_results(updates: Any, inner: Any, plan: Plan) -> None:
    """Refuses results of an optimizer that do not have the plan's trees and shapes."""
    for tree, layouts, name in (
        (updates, plan.grads, "the updates that the optimizer returns are"),
        (inner, plan.decoded_opt_state, "the state that the optimizer returns is"),
    ):
        planned = jax.tree.leaves(layouts)
        known = [layout.path for layout in planned]
        advice = "Return updates and a state like those that init and the gradients have."
        if tree is inner and {*known} < {*flatten(inner)[0]}:
            advice = (
                "The optimizer's update adds to its state, as optax.monitor does in its first "
                "update, but a plan has only the arrays that init makes. Let init make them "
                "too, or call shard_train_state with a state that has been updated once."
            )
        same_leaves(tree, known, name, advice)
        for x, layout in zip(jax.tree.leaves(tree), planned, strict=True):
            if jnp.shape(x) != layout.shape:
                _refuse_other_state(plan)
                raise GShardError(
                    f"{name} not shaped as planned: {layout.path} has {jnp.shape(x)}, not "
                    f"{layout.shape}. Return an array of the planned shape for every leaf."
                )


def _refuse_other_state(plan: Plan, error: Exception | None = None) -> None:
    """Raises a readable error where the state is not what the optimizer makes of the parameters."""
    own = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.grads)
    given = plan.decoded_opt_state
    try:
        wanted = jax.eval_shape(plan.tx.init, own)
    except Exception:  # it needs values, so the state cannot be compared
        return
    pairs = zip(*flatten(given)[:2], jax.tree.leaves(wanted), strict=False)
    wrong = [f"{path} {x.shape}, not {y.shape}" for path, x, y in pairs if x.shape != y.shape]
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        names = differences(flatten(given)[0], flatten(wanted)[0])
        wrong = [f"it has the tree of another optimizer: {names}"]
    if wrong:
        raise GShardError(
            "the optimizer state does not fit this optimizer and these parameters: "
            f"{some(wrong)}. Create it again before shard_train_state: "
            "state.replace(opt_state=state.tx.init(state.params)), or nnx.Optimizer(model, tx, "
            "wrt=...) of the model that you pass."
        ) from error


def _raise_optimizer_error(error: Exception) -> None:
    """Raises a readable error when an optimizer needs more than a train step gives it."""
    said = str(error)
    if "batch dimension in the 0th axis" in said:  # as optax says it
        raise GShardError(
            "the optimizer needs one gradient per example, and gshard has only their mean. "
            "Remove what needs one, such as optax.contrib.differentially_private_aggregate. optax "
            f"says: {said}"
        ) from error
    if "required keyword-only argument" in said or "must be provided" in said:
        raise GShardError(
            f"the optimizer needs more than gradients and parameters: {said.rstrip('.')}. "
            "make_train_step "
            "gives it value= (the loss); pass what else it needs in your own loop: "
            "state.tx.update(grads, state.opt_state, state.params, ...)."
        ) from error


def local_shards(
    params: Any, master: dict[str, jax.Array], plan: Plan
) -> tuple[list[jax.Array], Any]:
    """Returns the shards that the devices update, as global arrays of logical shape.

    These are master copies, or parameters that have none or were replaced after the rounding.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    structure = same_leaves(params, (layout.path for layout in stored), "the parameters are")
    leaves = map_leaves(lambda p, x: p.as_stored(x, "the parameters"), stored, params)

    leaves = _where_layouts_differ(slice_shards, leaves, stored, reduced, reduced, plan)
    for i, layout in enumerate(reduced):
        if layout.path in plan.master:
            if layout.path in master:
                leaves[i] = where_replaced(master[layout.path], leaves[i])
            else:
                leaves[i] = leaves[i].astype(plan.master[layout.path].dtype)
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
    """Runs `fun` on every device's shards of leaves whose layout changes; `others` are `after`."""
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


def cut_padding(tree: Any, layouts: Any) -> Any:
    """Removes the padding of stored arrays."""
    return map_leaves(lambda x, layout: layout.unpad(x), tree, layouts)
