"""The gradient stage: components and a batch in, reduced or local gradients out.

The stage is one `shard_map` over the data axes with explicit collectives and `check_vma=False`:
with the default the gradient of a replicated parameter arrives already summed, and a reduction on
top would count it N times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten, same_leaves
from gshard._util.validation import shown
from gshard.data.batch import check_examples, check_leaves
from gshard.sharding.batch_specs import check_trained_batch
from gshard.sharding.budget import accumulation
from gshard.sharding.layout import all_replicated
from gshard.sharding.mesh import refuse_other_context
from gshard.sharding.plan import Plan
from gshard.sharding.validate import refuse_abstract, refuse_donated
from gshard.train.comm.collectives import reduce_scalar
from gshard.train.comm.loop_order import in_loop_order
from gshard.train.comm.reduce import reduce, reduce_micro_batch, reduce_out_specs
from gshard.train.comm.state import max_over_devices, mean_over_devices
from gshard.train.global_loss.transfers import Transfer
from gshard.train.loss import add_sums, reduce_sums
from gshard.train.loss_reach import CheckedLoss
from gshard.train.microbatch import (
    DeviceInputs,
    MicroBatchSums,
    sum_over_micro_batches,
    total_weight,
    with_sums,
)
from gshard.train.non_trainable import non_trainable_layouts, pin_updates, to_storage
from gshard.train.options import StepOptions
from gshard.train.random_keys import typed_key
from gshard.train_state import OVERWRITTEN, Components, PureLoss

_REFUSAL = (
    "these gradients are LocalGradients (value_and_grad(sync=False)), which differ by device. "
    "Reduce them first: loss, grads = gshard.reduce_gradients(grads, plan)."
)


@dataclass(frozen=True)
class Gradients:
    """The results of the gradient stage, as global arrays of the whole batch; scalars are float32.

    If the weight and the weighted sum are 0, so are loss and gradient. The norm is finite only if
    every entry is.
    """

    grads: Any  # in the layouts of `plan.grads`
    loss: jax.Array
    aux: Any  # the loss's auxiliary output, or None
    weight: jax.Array  # by which sums over the batch were divided
    norm: jax.Array  # of the full gradient
    updates: dict[str, Any]  # non-trainable state that the loss changed or its gradient replaces
    numbers: jax.Array | None  # sums over the devices, for `BatchNumbers`
    finite_leaves: jax.Array  # booleans (devices, leaves): which gradients are finite on a device

    @property
    def finite(self) -> jax.Array:
        """Whether the norm is finite (boolean scalar); false also if the norm overflows float32."""
        return jnp.isfinite(self.norm)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalGradients:
    """Gradients that are not reduced yet: each device's terms of the sums over the examples.

    They add up (`total = total + more`). Every array has a leading axis over the devices of the
    data axes, so that each device keeps its own. `gshard.reduce_gradients(total, plan)` reduces
    them; an optimizer refuses them.

    Attributes:
      grads: a tree like the parameters: full gradients, or with `accumulate="scatter"` the local
        shard, summed over the shard group.
      loss: float32, or float64 of a float64 loss, `(devices,)`.
      weight: float32 `(devices,)`, by which the sums are divided in the end.
      aux: the loss's auxiliary output in a form that adds up, or None.
      accumulate: `local` or `scatter`.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> _, local = gshard.value_and_grad(loss_fn, plan, sync=False)(state.params, batch)
      >>> local.grads["w"].shape
      (8, 64, 32)
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: Any
    accumulate: str = field(metadata={"static": True})

    def __add__(self, other: LocalGradients) -> LocalGradients:
        if not isinstance(other, LocalGradients):
            self._refuse(shown(other))
        if jax.tree.structure(other) != jax.tree.structure(self):
            self._refuse(f"others ({other.accumulate})")
        bare = [dataclasses.replace(x, aux=None) for x in (self, other)]
        return dataclasses.replace(jax.tree.map(jnp.add, *bare), aux=add_sums(self.aux, other.aux))

    def __radd__(self, other: Any) -> LocalGradients:
        """`sum([...])` begins with 0."""
        if not isinstance(other, int) or other:
            self._refuse(shown(other))
        return self

    def __truediv__(self, _: Any) -> NoReturn:
        """As `1 / k` for k batches; scaling would be undone by the weight, or be wrong."""
        raise GShardError(
            "LocalGradients cannot be scaled: gshard.reduce_gradients divides the sums of all "
            "calls by the weight of all examples. For another factor scale the reduced gradients."
        )

    __mul__ = __rmul__ = __truediv__

    def _refuse(self, other: str) -> NoReturn:
        raise GShardError(
            f"LocalGradients ({self.accumulate}) were added to {other}. Add only results of one "
            "value_and_grad(sync=False), which have the same tree, aux and accumulation."
        )

    def __contains__(self, _: Any) -> NoReturn:
        """Flax's `apply_gradients` asks whether a gradient contains fp8 statistics."""
        raise GShardError(_REFUSAL)


def refuse_local_gradients(grads: Any, known: Sequence[str]) -> None:
    """Refuses gradients that are not reduced, also as the `nnx.State` that NNX converts them to."""
    if isinstance(grads, LocalGradients):
        raise GShardError(_REFUSAL)
    paths = flatten(grads)[0]
    own = {path.removeprefix("grads/") for path in paths if path.startswith("grads/")}
    if not set(known) <= set(paths) and set(known) <= own:
        raise GShardError(_REFUSAL)


@dataclass(frozen=True)
class GradientStage:
    """Computes gradients of the loss of the global batch, or of the mean of the devices' losses.

    The loss is a pure function of full parameters and examples: those of the global batch, of a
    micro-batch, or of one device, as `options.loss_semantics` says. Components have `params` in
    storage shapes.
    """

    loss: PureLoss
    plan: Plan
    options: StepOptions
    name: str = "the loss"  # in messages
    loss_transfers: list[Transfer] = field(default_factory=list)  # after the first call
    forward_passes: list[str] = field(default_factory=list)  # the same, see `with_sums`

    def reduced(
        self,
        parts: Components,
        batch: Any,
        rng: Any,
        scale: jax.Array | None = None,
        numbers: jax.Array | None = None,
        step: jax.Array | None = None,
    ) -> Gradients:
        """Returns reduced gradients; `scale`, a float32 scalar, multiplies the loss alone.

        `numbers`, float32 with a leading axis over the devices, are summed together with the loss.
        `step`, the number of the step, is for gradients that are rounded at random.
        """
        plan, options = self.plan, self.options
        seed = step.astype(jnp.uint32) if step is not None and plan.rounds_at_random else None
        how = accumulation(plan, options.micro_batches, options.accumulate)
        end = partial(reduce, plan=plan, accumulate=how, options=options)
        (grads, value, aux, weight, norm, sums, finite), updates = self._on_devices(
            end, reduce_out_specs(plan), how, parts, batch, rng, scale, numbers=numbers, seed=seed
        )
        grads = jax.tree.unflatten(jax.tree.structure(parts.params), grads)
        return Gradients(grads, value, aux, weight, norm, updates, sums, finite)

    def local(
        self,
        parts: Components,
        batch: Any,
        rng: Any,
        own_non_trainable: dict[str, Any] | None = None,
    ) -> tuple[LocalGradients, dict[str, Any]]:
        """Returns each device's sums over its examples, and the non-trainable state that changed.

        `own_non_trainable` is state that differs by device, with a leading axis over the devices.
        If it is given, what the loss changes stays local and is returned together with it, for
        `mean_non_trainable`.
        """
        options = self.options
        how = accumulation(self.plan, options.micro_batches, options.accumulate, sync=False)

        def end(own: Any, **_: Any) -> Any:
            return jax.tree.map(lambda x: x[None], own)

        (grads, value, weight, aux), updates = self._on_devices(
            end, self.plan.device_spec, how, parts, batch, rng, None, own_non_trainable
        )
        grads = jax.tree.unflatten(jax.tree.structure(parts.params), grads)
        return LocalGradients(grads, value, weight, aux, how), updates

    def _on_devices(
        self,
        end: Callable[..., Any],
        out_specs: Any,
        accumulate: str,
        parts: Components,
        batch: Any,
        rng: Any,
        scale: jax.Array | None,
        own_non_trainable: dict[str, Any] | None = None,
        numbers: jax.Array | None = None,
        seed: jax.Array | None = None,
    ) -> Any:
        """Runs `end` on each device; also returns the state that the loss changed.

        It is called as `end(own, order=, scale=, numbers=, seed=)`: `own` contains one device's
        gradients, loss, weight and aux, as sums; `order` is the order in which gradients become
        available. The changed state is by name, in storage shapes.
        """
        plan, options, group = self.plan, self.options, self.plan.group
        refuse_other_context(plan.mesh)
        if seed is None and plan.rounds_at_random:
            raise GShardError(
                "Gradients are rounded at random here, by scatter_dtype='int4' or "
                "rounding='stochastic', seeded by the number of the step. Only a step of "
                "make_train_step knows that number. Use make_train_step, or scatter_dtype='int8'."
            )
        stored = jax.tree.leaves(plan.params)
        structure = same_leaves(parts.params, (x.path for x in stored), "the parameters are")
        own_state = own_non_trainable or {}
        shared = {k: x for k, x in parts.non_trainable.items() if k not in own_state}
        layouts = non_trainable_layouts(shared, plan)
        all_layouts = {**layouts, **{k: all_replicated(x, group) for k, x in own_state.items()}}
        check_leaves(batch)  # in a user's own loop the batch need not come from shard_batch
        check_examples(batch, group.batch_shards, options.micro_batches)
        dims = plan.sequence_dims(batch)
        check_trained_batch(batch, dims, plan.named_sequence_dims)
        refuse_abstract(given := jax.tree.leaves(parts.params))
        refuse_donated(given)
        _check_params(parts.params, plan)

        def on_device(
            leaves: list[jax.Array],
            shared: Any,
            own_state: Any,
            batch: Any,
            keys: Any,
            scale: Any,
            numbers: Any,
        ) -> Any:
            rng, step, seed = keys
            own_state = jax.tree.map(lambda x: x[0], own_state)
            inputs = DeviceInputs(leaves, {**shared, **own_state}, all_layouts, batch, rng, dims)

            one = CheckedLoss(self.loss, structure, plan, options, accumulate, scale, step, seed)
            finish = partial(reduce_micro_batch, plan=plan, accumulate=accumulate, options=options)

            def run() -> MicroBatchSums:
                if OVERWRITTEN in inputs.non_trainable or (one.is_global and scale is not None):
                    # fp8 statistics of gradients need gradients at the scale of a single device,
                    # and sums over examples would overflow float16 where their mean does not
                    weight = total_weight(one, inputs)
                    if weight is not None:
                        weight = reduce_scalar(weight, group.axes)
                        of_one = 1 if scale is None else scale
                        one.scale = of_one / jnp.where(weight == 0, 1, weight)
                return sum_over_micro_batches(one, inputs, finish)

            total = with_sums(one, inputs, run)
            one.refuse_unreached(self.name)
            self.loss_transfers[:] = one.transfers
            self.forward_passes[:] = one.forward_passes
            own = (total.grads, total.loss, total.weight, total.aux)
            numbers = jax.tree.map(lambda x: x[0], numbers)
            result = end(own, order=one.order, scale=one.scale, numbers=numbers, seed=seed)
            if own_non_trainable is not None:
                changed = {**own_state, **total.updates}
                return result, jax.tree.map(lambda x: x[None], changed)
            if one.adds_updates:
                updates = _as_stored(reduce_sums(total.updates, None, group.axes), inputs)
            elif one.is_global:
                updates = total.updates
            else:
                updates = mean_over_devices(total.updates, group, options.sync_buffers)
            return result, {**updates, **max_over_devices(total.overwritten, group)}

        mapped = jax.shard_map(
            in_loop_order(on_device, plan.group),
            mesh=plan.mesh,
            in_specs=(
                [layout.data_spec for layout in stored],
                jax.tree.map(lambda layout: layout.data_spec, layouts),
                plan.device_spec,
                plan.batch_specs(batch),
                jax.P(),
                jax.P(),
                plan.device_spec,
            ),
            out_specs=(out_specs, jax.P() if own_non_trainable is None else plan.device_spec),
            axis_names=set(group.axes),
            check_vma=False,
        )
        # JAX fetches from the host, and leaves model axes to XLA, only in compiled code
        if plan.bytes_per_device["host"] or group.model_axes:
            mapped = jax.jit(mapped)
        found, updates = mapped(
            jax.tree.leaves(parts.params),
            to_storage(shared, layouts, plan),
            own_state,
            batch,
            (typed_key(rng), parts.step if _may_be_keys(parts.non_trainable) else None, seed),
            scale,
            numbers,
        )
        return found, pin_updates(updates, plan) if own_non_trainable is None else updates


def _as_stored(updates: dict[str, Any], inputs: DeviceInputs) -> dict[str, Any]:
    """Casts sums to the dtypes of the state that they replace."""

    def cast(x: jax.Array, like: jax.Array) -> jax.Array:
        return x if x.dtype == like.dtype else x.astype(like.dtype)

    return {name: jax.tree.map(cast, x, inputs.non_trainable[name]) for name, x in updates.items()}


def _may_be_keys(non_trainable: dict[str, Any]) -> bool:
    """Whether any array may be an old-style key; only its use in the loss shows if it is one."""
    return any(x.dtype == jnp.uint32 and jnp.ndim(x) for x in jax.tree.leaves(non_trainable))


def _check_params(params: Any, plan: Plan) -> None:
    """Refuses parameters that have not the shape, or with a `Precision` not the dtype, as stored.

    An optimizer that computes gradients by itself has them in their logical shapes.
    """
    for x, layout in zip(jax.tree.leaves(params), jax.tree.leaves(plan.params), strict=True):
        if x.shape != layout.stored_shape:
            raise GShardError(
                f"the parameter {layout.path} has shape {x.shape}, and the plan stores it as "
                f"{layout.stored_shape}. Pass state.params. Inside the update of an optimizer "
                "parameters have no padding; to compute gradients there, shard the state with "
                'indivisible="replicate", which needs none.'
            )
        if plan.precision is not None and x.dtype != layout.dtype:
            raise GShardError(
                f"the parameter {layout.path} is {x.dtype}, and the plan computes with "
                f"{layout.dtype}. Pass state.params, which precision= has cast, or cast what you "
                f"computed from them: x.astype(jnp.{layout.dtype})."
            )
