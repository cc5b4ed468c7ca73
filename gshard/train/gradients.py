"""The gradient stage: components and a batch in, reduced gradients out.

The stage is one `shard_map` over the data axes with explicit collectives and `check_vma=False`:
with the default the gradient of a replicated parameter arrives already summed, and a reduction on
top would count it N times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.pytree import same_leaves
from gshard.data.batch import check_examples, check_leaves
from gshard.sharding.budget import accumulation
from gshard.sharding.plan import Plan, all_replicated
from gshard.train.comm.collectives import max_over_devices, mean_over_devices, reduce_scalar
from gshard.train.comm.reduce import (
    accumulation_layouts,
    reduce,
    reduce_micro_batch,
    reduce_out_specs,
)
from gshard.train.local_gradients import LocalGradients
from gshard.train.loss import typed_key
from gshard.train.microbatch import MicroBatchLoss, sum_over_micro_batches, total_weight
from gshard.train.non_trainable import non_trainable_layouts, pin_updates, to_storage
from gshard.train.options import StepOptions
from gshard.train_state import OVERWRITTEN, Components, PureLoss


@dataclass(frozen=True)
class Gradients:
    """The results of the gradient stage, as global arrays.

    Attributes:
      grads: a tree like the parameters, in the layouts of `plan.grads`.
      loss: float32 scalar, the loss of the global batch.
      aux: the loss's auxiliary output, reduced over the batch, or None.
      weight: float32 scalar by which the sums over the global batch were divided; if it is 0, loss
        and gradient are 0.
      norm: float32 scalar, the norm of the full gradient; finite only if every entry is.
      updates: non-trainable state by name: what the loss changed, and what its gradient replaces.
    """

    grads: Any
    loss: jax.Array
    aux: Any
    weight: jax.Array
    norm: jax.Array
    updates: dict[str, Any]

    @property
    def finite(self) -> jax.Array:
        """Whether the norm is finite (boolean scalar); false also if the norm overflows float32."""
        return jnp.isfinite(self.norm)


def compute_gradients(
    loss: PureLoss,
    parts: Components,
    batch: Any,
    rng: Any,
    plan: Plan,
    options: StepOptions,
    scale: jax.Array | None = None,
) -> Gradients:
    """Computes the gradient of the mean loss over the examples of the global batch.

    Args:
      loss: a pure function of full parameters and the examples of one device.
      parts: the components of the state, `params` in storage shapes.
      batch: global arrays, their examples sharded over the data axes; scalars are replicated.
      rng: a typed key or None; folded with device and micro-batch.
      plan: the plan, which has the layouts.
      options: the options of the step.
      scale: float32 scalar; the loss is multiplied by it, and the gradient divided by it.
    """
    how = accumulation(plan, options.micro_batches, options.accumulate)

    def reduced(own: Any, order: list[int], scale: jax.Array | None) -> Any:
        return reduce(own, plan, how, options, order, scale)

    (grads, value, aux, weight, norm), updates = _on_devices(
        reduced, reduce_out_specs(plan), loss, parts, batch, rng, plan, options, how, scale
    )
    grads = jax.tree.unflatten(jax.tree.structure(parts.params), grads)
    return Gradients(grads, value, aux, weight, norm, updates)


def compute_local_gradients(
    loss: PureLoss,
    parts: Components,
    batch: Any,
    rng: Any,
    plan: Plan,
    options: StepOptions,
    own_non_trainable: dict[str, Any] | None = None,
) -> tuple[LocalGradients, dict[str, Any]]:
    """Computes each device's sums over its examples, and the non-trainable state that changed.

    Arguments are those of `compute_gradients`. Gradients that accumulate locally are not
    communicated; others are reduce-scattered as soon as they are computed.

    `own_non_trainable` is state that differs by device, with a leading axis over the devices. If it
    is given, what the loss changes stays local and is returned together with it, for
    `mean_non_trainable`.
    """
    how = accumulation(plan, options.micro_batches, options.accumulate, sync=False)

    def sums(own: Any, *_: Any) -> Any:
        return jax.tree.map(lambda x: x[None], own)

    (grads, value, weight, aux), updates = _on_devices(
        sums,
        plan.batch_spec,
        loss,
        parts,
        batch,
        rng,
        plan,
        options,
        how,
        own_non_trainable=own_non_trainable,
    )
    grads = jax.tree.unflatten(jax.tree.structure(parts.params), grads)
    return LocalGradients(grads, value, weight, aux, how), updates


def _on_devices(
    end: Callable[[Any, list[int], Any], Any],
    out_specs: Any,
    loss: PureLoss,
    parts: Components,
    batch: Any,
    rng: Any,
    plan: Plan,
    options: StepOptions,
    accumulate: str,
    scale: jax.Array | None = None,
    own_non_trainable: dict[str, Any] | None = None,
) -> Any:
    """Runs `end(own, order, scale)` on every device; also returns the state that the loss changed.

    `own` contains one device's gradients, loss, weight and aux, as sums; `order` is the order in
    which gradients become available; `out_specs` are the specs of what `end` returns. The changed
    state is returned by name, in storage shapes.
    """
    stored = jax.tree.leaves(plan.params)
    structure = same_leaves(parts.params, (x.path for x in stored), "the parameters are")
    apart = own_non_trainable or {}
    layouts = non_trainable_layouts(
        {k: x for k, x in parts.non_trainable.items() if k not in apart}, plan
    )
    own_layouts = {name: all_replicated(tree, plan.group) for name, tree in apart.items()}
    check_leaves(batch)  # in a user's own loop the batch need not come from shard_batch
    check_examples(batch, plan.group.devices, options.micro_batches)
    _check_dtypes(parts.params, plan)

    def on_device(
        leaves: list[jax.Array], non_trainable: Any, apart: Any, batch: Any, keys: Any, scale: Any
    ) -> Any:
        rng, step = keys
        apart = jax.tree.map(lambda x: x[0], apart)
        non_trainable = {**non_trainable, **apart}
        targets = accumulation_layouts(plan, accumulate)

        def make(scale: jax.Array | None) -> MicroBatchLoss:
            return MicroBatchLoss(loss, structure, stored, targets, plan, options, scale, step)

        everywhere = {**layouts, **own_layouts}
        given = (leaves, non_trainable, everywhere, batch, rng, options.micro_batches)

        def finish(grads: list[jax.Array]) -> list[jax.Array]:
            return reduce_micro_batch(grads, plan, accumulate, options)

        if (
            OVERWRITTEN in non_trainable
        ):  # fp8 statistics of gradients need gradients at the scale of a single device
            weight = reduce_scalar(total_weight(make(None), *given), plan.group.axes)
            scale = (1 if scale is None else scale) / jnp.where(weight == 0, 1, weight)
        one = make(scale)
        total = sum_over_micro_batches(one, *given, finish)
        own = (total.grads, total.loss, total.weight, total.aux)
        if own_non_trainable is not None:
            changed = {**apart, **total.updates}
            return end(own, one.order, scale), jax.tree.map(lambda x: x[None], changed)
        updates = mean_over_devices(total.updates, plan.group, options.sync_buffers)
        return end(own, one.order, scale), {
            **updates,
            **max_over_devices(total.overwritten, plan.group),
        }

    rows = jax.tree.map(lambda x: plan.batch_spec if jnp.ndim(x) else jax.P(), batch)
    mapped = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(
            [layout.data_spec for layout in stored],
            jax.tree.map(lambda layout: layout.data_spec, layouts),
            plan.batch_spec,
            rows,
            jax.P(),
            jax.P(),
        ),
        out_specs=(out_specs, jax.P() if own_non_trainable is None else plan.batch_spec),
        axis_names=set(plan.data_axes),
        check_vma=False,
    )
    if plan.bytes_per_device["host"]:  # JAX fetches from the host only in compiled code
        mapped = jax.jit(mapped)
    found, updates = mapped(
        jax.tree.leaves(parts.params),
        to_storage({name: parts.non_trainable[name] for name in layouts}, layouts, plan),
        apart,
        batch,
        (typed_key(rng), parts.step if _may_be_keys(parts.non_trainable) else None),
        scale,
    )
    return found, pin_updates(updates, plan) if own_non_trainable is None else updates


def _may_be_keys(non_trainable: dict[str, Any]) -> bool:
    """Whether any array may be an old-style key; only its use in the loss shows if it is one."""
    return any(x.dtype == jnp.uint32 and jnp.ndim(x) for x in jax.tree.leaves(non_trainable))


def _check_dtypes(params: Any, plan: Plan) -> None:
    """Refuses parameters whose dtype is not the compute dtype of the plan's `Precision`."""
    if plan.precision is None:
        return
    for x, layout in zip(jax.tree.leaves(params), jax.tree.leaves(plan.params), strict=True):
        if x.dtype != layout.dtype:
            raise GShardError(
                f"the parameter {layout.path} is {x.dtype}, and the plan computes with "
                f"{layout.dtype}. Pass state.params, which precision= made so."
            )
