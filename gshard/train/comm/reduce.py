"""Reduces the gradient sums of each device over all devices, in the `shard_map` of `gradients`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard._util.arrays import cast, wide_dtype
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.comm.buckets import BUCKET_SIZE, default_reduce_bucket
from gshard.train.comm.collectives import (
    on_model_axes,
    reduce_bucket_by_bucket,
    reduce_scalar,
    reduce_vector,
    scatter_leaves,
)
from gshard.train.loss import reduce_sums
from gshard.train.options import StepOptions


def accumulation_layouts(plan: Plan, accumulate: str) -> list[Layout]:
    """Returns the layouts of gradients while they accumulate."""
    reduced = jax.tree.leaves(plan.grads)
    return [layout.replicated() for layout in reduced] if accumulate == "local" else reduced


def reduce_micro_batch(
    grads: list[jax.Array], plan: Plan, accumulate: str, options: StepOptions
) -> list[jax.Array]:
    """Reduces the gradients of one micro-batch to the form in which they are added up.

    A barrier keeps each reduction before the sum: XLA on TPU and GPU would otherwise add up full
    gradients and reduce them once, after the loop.
    """
    targets = accumulation_layouts(plan, accumulate)
    if accumulate == "sync":
        grads = _sum_over_devices(grads, targets, plan, options, range(len(grads)))
    return [
        jax.lax.optimization_barrier(g) if accumulate == "sync" or target.dim is not None else g
        for g, target in zip(grads, targets, strict=True)
    ]


def reduce_out_specs(plan: Plan) -> tuple[Any, ...]:
    """Returns the `out_specs` of the results of `reduce`."""
    specs = [layout.data_spec for layout in jax.tree.leaves(plan.grads)]
    return specs, jax.P(), jax.P(), jax.P(), jax.P(), jax.P(), plan.device_spec


def reduce(
    own: Any,
    plan: Plan,
    accumulate: str,
    options: StepOptions,
    order: Sequence[int],
    scale: jax.Array | None = None,
    numbers: jax.Array | None = None,
    seed: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array, Any, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Sums over all devices, and divides once by the weight of the global batch.

    `own` are one device's gradients, loss, weight and aux, as sums; `order` is the order in which
    gradients become available, `scale` the factor by which they were multiplied. A weight of None
    is 1 for the whole batch. `numbers` are summed in the collective of the loss, `seed` is that of
    gradients that are rounded at random. Returns gradients,
    loss, aux, weight, the norm of the gradient, the sums, and which of the device's gradients are
    finite: the fields of `Gradients`.
    """
    grads, value, weight, aux = own
    axes = plan.group.axes
    reduced, targets = jax.tree.leaves(plan.grads), accumulation_layouts(plan, accumulate)
    weight = None if weight is None else reduce_scalar(weight, axes)
    if accumulate != "sync":  # with "sync" each micro-batch was reduced already
        grads = _sum_over_devices(grads, targets, plan, options, order, seed)
    if numbers is not None:
        total = reduce_vector(jnp.append(numbers.astype(value.dtype), value), axes)
        value, numbers = total[-1], total[:-1].astype(numbers.dtype)
    else:
        value = reduce_scalar(value, axes)
    divisor = None if weight is None else divisor_of(weight, value)
    factors = [x for x in (divisor, scale) if x is not None]
    factor = math.prod(factors[1:], start=factors[0]) if factors else None
    wide = [plan.master.get(layout.path, g).dtype for g, layout in zip(grads, reduced, strict=True)]
    grads = [_quotient(cast(g, d), factor) for g, d in zip(grads, wide, strict=True)]
    norm, finite = _norm(grads, plan)
    return (
        grads,
        value / (1 if divisor is None else divisor),
        plan.output(reduce_sums(aux, divisor, axes)),
        jnp.ones((), jnp.float32) if weight is None else weight,
        norm,
        numbers,
        finite,
    )


def divisor_of(weight: jax.Array, value: jax.Array) -> jax.Array:
    """What a loss and its gradient are divided by: infinity where sum and weight are both 0.

    So both are 0 for an empty batch. Another sum of weight 0 gives an infinite loss, as on one
    device.
    """
    return jnp.where((weight == 0) & (value == 0), jnp.inf, weight)


def _quotient(g: jax.Array, by: jax.Array | None) -> jax.Array:
    if by is None:
        return g
    # XLA recomputes a product in each kernel that reads it, but writes a quotient to memory.
    dtype = wide_dtype(g.dtype)
    x = g if jnp.iscomplexobj(g) else g.astype(dtype)  # float8 is not promoted
    return (x * (1 / by.astype(dtype))).astype(g.dtype)


def _norm(grads: list[jax.Array], plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Computes the norm of the gradient, at least in float32 and the same on every device.

    Also returns which gradients have a finite sum of squares on this device: booleans (1, leaves),
    with model-parallel axes (devices of these, leaves).
    """
    layouts, group = jax.tree.leaves(plan.grads), plan.group
    dtype = wide_dtype(*(g.dtype for g in grads))

    def sums(grads: list[jax.Array]) -> jax.Array:
        totals = [jnp.zeros(1, dtype)]  # for a tree without leaves
        for g in grads:
            # not `jax.numpy`, whose calls take three times as long to trace
            size = lax.abs(g) if jnp.iscomplexobj(g) else g
            square = lax.square(lax.convert_element_type(size, dtype))
            totals.append(lax.reshape(lax.reduce_sum(square, range(g.ndim)), (1,)))
        return lax.concatenate(totals, 0)[None]

    if group.model_axes:  # not each sum over these axes too, but that of all
        names = tuple(name for name, _ in group.model_axes)
        specs = [layout.model_spec for layout in layouts]
        sums = jax.shard_map(
            sums, in_specs=(specs,), out_specs=jax.P(names), axis_names={*names}, check_vma=False
        )
    every = sums(grads)
    copies = np.array([1, *(_copies(layout) for layout in layouts)], dtype)
    squares = lax.reduce_sum(lax.div(every, np.broadcast_to(copies, every.shape)), (0, 1))
    return jnp.sqrt(reduce_scalar(squares, group.axes)), lax.is_finite(every)[:, 1:]


def _copies(layout: Layout) -> int:
    """The number of devices that store the same shard."""
    group = layout.group
    data = group.devices if layout.dim is None else group.replicas
    used = {name for names in layout.model_axes for name in names}
    return data * math.prod(size for name, size in group.model_axes if name not in used)


def _sum_over_devices(
    grads: list[jax.Array],
    targets: Sequence[Layout],
    plan: Plan,
    options: StepOptions,
    order: Sequence[int],
    seed: jax.Array | None = None,
) -> list[jax.Array]:
    """Reduce-scatters local gradients; sums full ones over data axes, shards over replicas."""
    reduced = jax.tree.leaves(plan.grads)
    size, ends = options.bucket_size, options.end_bucket_size
    most = default_reduce_bucket(plan.group) if size == BUCKET_SIZE else size
    late = [r if t.dim is None else r.replicated() for t, r in zip(targets, reduced, strict=True)]

    def sums(grads: list[jax.Array], seed: jax.Array | None = None) -> list[jax.Array]:
        grads = scatter_leaves(grads, [layout.local() for layout in late], size, seed)
        over = [r.group.axes if r.dim is None else r.group.replica for r in reduced]
        for axes in dict.fromkeys((plan.group.axes, *over, plan.group.replica)):
            chosen = [i for i in order if over[i] == axes]
            totals = reduce_bucket_by_bucket([grads[i] for i in chosen], axes, most, ends)
            for i, total in zip(chosen, totals, strict=True):
                grads[i] = total
        return grads

    specs = [layout.model_spec for layout in reduced]
    return on_model_axes(sums, grads, specs, plan.group, seed)
