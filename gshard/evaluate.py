"""Using divided parameters outside the train step: evaluation, and whole values on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gshard.batch import check_rows, shard_batch
from gshard.collectives import reduce_scalar
from gshard.errors import GShardError
from gshard.first_use import Use, with_divided
from gshard.layout import Layout
from gshard.loss import Weighted
from gshard.plan import Plan, same_leaves
from gshard.state import Parts, kind_of


def make_eval_step(fn: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """A compiled function of the whole parameters and a batch.

    Args:
      fn: Linen `fn(params, batch)` (keywords as in `make_train_step`), NNX `fn(model, batch)`. Returns
        a tree of floating scalars (means over its rows), `gshard.Weighted`, and arrays with one entry
        per row.
      plan: of `shard_train_state`.

    Returns:
      `f(state, batch)`, NNX `f(model, batch)`: the same tree for the global batch: means, weighted
      means, and global arrays with all rows.
    """
    uses = [Use(layout, layout) for layout in jax.tree.leaves(plan.params)]
    uses = [None if use.pointless else use for use in uses]

    def run(parts: Parts, batch: Any) -> Any:
        structure = same_leaves(parts.params, plan.params, "the parameters")
        pure = plan.kind.loss(fn, (), parts.static)
        local_rows = check_rows(batch, plan.group.devices, 1) // plan.group.devices
        form: list[Any] = []  # what fn returned: structure, and which leaves are scalars

        def whole(leaves: list[jax.Array], extras: Any, batch: Any) -> Any:
            return pure(jax.tree.unflatten(structure, leaves), extras, batch, None)[0]

        def on_device(leaves: list[jax.Array], extras: Any, batch: Any) -> Any:
            taps = [x if use is None else use.tap() for x, use in zip(leaves, uses, strict=True)]
            out = with_divided(whole, uses, leaves, taps, extras, batch)
            flat, tree = jax.tree.flatten(out, is_leaf=lambda x: isinstance(x, Weighted))
            flat = [_over_devices(x, local_rows, plan) for x in flat]
            form[:] = [tree, [x.ndim == 0 for x in flat]]
            return [x for x in flat if not x.ndim], [x for x in flat if x.ndim]

        rows = jax.tree.map(lambda x: plan.batch_spec if jnp.ndim(x) else jax.P(), batch)
        scalars, arrays = jax.shard_map(
            on_device,
            mesh=plan.mesh,
            in_specs=([x.spec for x in jax.tree.leaves(plan.params)], jax.P(), rows),
            out_specs=(jax.P(), plan.batch_spec),
            check_vma=False,
        )(jax.tree.leaves(parts.params), parts.extras, batch)
        tree, is_scalar = form
        scalars, arrays = iter(scalars), iter(arrays)
        return jax.tree.unflatten(tree, [next(scalars if x else arrays) for x in is_scalar])

    jitted = jax.jit(run)

    def eval_step(state: Any, batch: Any) -> Any:
        return jitted(plan.kind.split_inference(state), shard_batch(batch, plan))

    return eval_step


def _over_devices(x: Any, rows: int, plan: Plan) -> jax.Array:
    """One output of one device as a part of the global one."""
    axes = plan.group.axes
    if isinstance(x, Weighted):
        return reduce_scalar(x.sum, axes) / reduce_scalar(jnp.asarray(x.weight, jnp.float32), axes)
    if not x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
        return reduce_scalar(x, axes) / plan.group.devices
    if x.ndim and x.shape[0] == rows:
        return x
    raise GShardError(
        f"an evaluation output of shape {x.shape} and dtype {x.dtype} is neither a floating mean, nor "
        f"a gshard.Weighted, nor an array with one entry for each of a device's {rows} rows."
    )


def full_params(state: Any) -> Any:
    """The whole parameters, logical shapes, as NumPy arrays on every process.

    Gathered leaf by leaf, so that no device holds more than one whole leaf.

    Args:
      state: of `shard_train_state` (NNX: the `(model, optimizer)` pair), at any level.

    Returns:
      A tree like the user's own parameters; for NNX an `nnx.State`, for `nnx.update(model, params)`.
    """
    plan = plan_of(state)
    params = plan.kind.split(state).params
    return plan.kind.params_like(_to_host(params, plan.params), plan.template)


def unwrap(state: Any) -> Any:
    """The user's plain train state: host arrays of logical shape, the user's own optimizer."""
    plan = plan_of(state)
    parts, layouts = plan.kind.split(state), plan.layouts
    host = Parts(
        _to_host(parts.params, layouts.params),
        _to_host(parts.opt_state.inner, layouts.opt_state),
        _to_host(parts.step, layouts.step),
        _to_host(parts.extras, layouts.extras),
        parts.static,
    )
    return plan.kind.merge(host, state, plan.tx)


def plan_of(state: Any) -> Plan:
    """The plan that a train state follows.

    Raises:
      GShardError: for a state that `shard_train_state` did not make.
    """
    plan = getattr(kind_of(state).tx(state), "plan", None)
    if plan is None:
        raise GShardError("this state has no plan: it did not come from gshard.shard_train_state.")
    return plan


def _to_host(tree: Any, layouts: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(layouts)
    return jax.tree.unflatten(
        structure, [_whole_on_host(x, place) for x, place in zip(leaves, places, strict=True)]
    )


def _whole_on_host(x: jax.Array, layout: Layout) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x if x.is_fully_addressable else x.addressable_data(0)
    if x.is_fully_addressable:
        return layout.cut(np.array(x))
    if layout.dim is None:
        return np.array(x.addressable_data(0))
    return layout.cut(np.asarray(multihost_utils.process_allgather(x, tiled=True)))
