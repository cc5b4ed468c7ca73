"""`jax.value_and_grad` with the collectives of a level, for a train step of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arguments import named_arguments
from gshard._util.errors import GShardError, place_of
from gshard._util.pytree import flatten, same_leaves, subscript
from gshard._util.validation import flag, names_of, shown
from gshard.sharding.level import Accumulate
from gshard.sharding.mesh import refuse_other_context
from gshard.sharding.plan import Plan, check_call
from gshard.train.comm.buckets import BUCKET_SIZE, END_BUCKET_SIZE
from gshard.train.comm.reduce import accumulation_layouts, divisor_of, reduce, reduce_out_specs
from gshard.train.comm.state import mean_over_devices
from gshard.train.gradients import Gradients, GradientStage, LocalGradients
from gshard.train.non_trainable import pin_updates
from gshard.train.options import LossSemantics, StepOptions, check_options
from gshard.train.same_program import note_program
from gshard.train_state import OVERWRITTEN

_INSTEAD = {  # of jax.value_and_grad
    "plan": "It is called as value_and_grad(loss_fn, plan).",
    "argnums": "The gradient is that of the first argument of the loss.",
    "reduce_axes": "Gradients are reduced over all data axes of the plan.",
}
_CALL = (
    "It is called as f(params, batch), with NNX as f(model, batch), and the loss takes both. A key "
    "and fields of the state are passed by name: f(params, batch, rng=key)."
)


@named_arguments(_INSTEAD)
def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    sync: bool = True,
    has_aux: bool = False,
    mutable: str | Sequence[str] = (),
    micro_batches: int = 1,
    accumulate: Accumulate = "level",
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
    sync_buffers: bool = False,
    bucket_size: int = BUCKET_SIZE,
    end_bucket_size: int = END_BUCKET_SIZE,
    loss_semantics: LossSemantics = "global",
    gather_limit: int | None = None,
) -> Callable[..., Any]:
    """Transforms a loss like `jax.value_and_grad`, over the global batch, with sharded gradients.

    Call the result inside your own `jax.jit` (or `nnx.jit`), then
    `state.apply_gradients(grads=grads)` (or `optimizer.update(model, grads)`): the layouts stay
    those of the plan. With several processes pass batches from `shard_batch` or a loader: `jit`
    would take each process's NumPy array for the global batch, and use only the examples of that
    process's devices.

    Args:
      loss_fn: as in `make_train_step`.
      plan: the plan of `shard_train_state`.
      sync: `False` for accumulation over separate calls: the gradients are `LocalGradients`. Add
        those of several batches, then call `loss, grads = reduce_gradients(total, plan)`.
      has_aux: whether the loss returns `(loss, aux)`; aux as in `make_train_step`.
      mutable: Linen collections that the loss returns as updates, as in `make_train_step`.
      micro_batches: number of slices in which each device processes its examples, one after the
        other.
      accumulate: as in `make_train_step`. With `sync=False` it applies to separate calls too:
        `"local"` communicates no gradient before `reduce_gradients`, `"scatter"` keeps 1/N of it,
        and `"sync"` is refused.
      reshard_after_forward: as in `make_train_step`.
      prefetch: as in `make_train_step`.
      sync_buffers: as in `make_train_step`.
      bucket_size: elements of one bucket.
      end_bucket_size: as in `make_train_step`.
      loss_semantics: as in `make_train_step`. With `sync=False` the batch is that of one call, and
        numerators and denominators of a quotient of sums add up over the calls. Other losses are
        averaged over the calls, weighted by their numbers of examples.
      gather_limit: as in `make_train_step`.

    Returns:
      Linen: `f(params, batch, *, rng=None, **collections) -> (value, grads)`, where value is the
      loss, `(loss, aux)`, `(loss, updates)` or `(loss, (aux, updates))`. NNX: `f(model, batch)`;
      what the loss changes in the model is written into it. Keys are not folded with the step;
      with `"per_micro_batch"` they are folded with the micro-batch, with `"per_device"` with
      device and micro-batch. With `sync=False` the loss has the shape `(devices,)`: each device's
      loss with `"per_device"`, otherwise each device's term of a sum, which `reduce_gradients`
      divides by the total weight; `reduce_gradients` returns aux as well. Value and gradients can
      be differentiated again, as for a gradient penalty. Under `jax.checkpoint` or in a scan, such
      derivatives are NaN with `reshard_after_forward=n`, and with respect to sharded frozen
      parameters.

    Raises:
      GShardError: an option is not valid; at the call, the batch or state does not fit the plan.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "zero2", min_shard_size=16)
      >>> grad = gshard.value_and_grad(loss_fn, plan)
      >>> loss, grads = jax.jit(grad)(state.params, gshard.shard_batch(batch, plan))
      >>> state = state.apply_gradients(grads=grads)
    """
    check_call(loss_fn, plan, "value_and_grad(loss_fn, plan)")
    if not flag("sync", sync) and OVERWRITTEN in plan.non_trainable:
        raise GShardError(
            "sync=False: gradients of separate calls are added, but gradients that replace their "
            "parameter (params['_overwrite_with_gradient'], fp8 statistics) must not be. Pass all "
            "batches of one step in one call, with micro_batches=."
        )
    options = StepOptions(
        has_aux,
        micro_batches,
        accumulate,
        bucket_size,
        sync_buffers,
        reshard_after_forward,
        prefetch,
        by_examples=not sync,
        end_bucket_size=end_bucket_size,
        loss_semantics=loss_semantics,
        gather_limit=gather_limit,
        mutable=names_of("mutable", mutable),
    )
    check_options(plan, options, sync)
    names, name = options.mutable, f"the loss {place_of(loss_fn)}"

    @named_arguments({"*": _CALL, "batch": _CALL}, "value_and_grad(loss_fn, plan)")
    def on_batch(target: Any, batch: Any, /, *, rng: Any = None, **collections: Any) -> Any:
        collections = {name: _arrays(name, tree) for name, tree in collections.items()}
        parts = plan.kind.split_target(target, collections)
        pure = plan.kind.loss(loss_fn, names, parts.static, collections)
        stage = GradientStage(pure, plan, options, name)

        def arrays(*args: Any) -> Any:
            return vars(stage.reduced(*args)) if sync else stage.local(*args)

        note_program(plan, name, arrays, parts, batch, rng)
        if sync:
            result = stage.reduced(parts, batch, rng)
            grads = plan.kind.gradients(result.grads, target, result.updates)
            updates = plan.kind.absorb(target, parts, result.updates)
            return _value(result.loss, (result.aux, has_aux), (updates, bool(names))), grads
        sums, updates = stage.local(parts, batch, rng)
        updates = plan.kind.absorb(target, parts, updates)
        losses = sums.loss
        if loss_semantics == "per_device":
            losses = losses / divisor_of(sums.weight, losses)
        grads = plan.kind.gradients(sums.grads, target, {})
        return _value(losses, (updates, bool(names))), dataclasses.replace(sums, grads=grads)

    return on_batch


def _arrays(name: str, tree: Any) -> Any:
    """A field of the state that a loss is given by name; Python numbers become arrays."""
    for path, x in zip(*flatten(tree)[:2], strict=True):
        if isinstance(x, bool) or not (hasattr(x, "dtype") or isinstance(x, (int, float, complex))):
            advice = "Make it an array, or leave it out."
            if not path:
                bound = f"functools.partial(loss_fn, {name}={shown(x)})"
                advice = f"Bind other arguments of the loss: value_and_grad({bound}, plan)."
            raise GShardError(
                f"{name}{subscript(path)} is {shown(x)}, not an array. By name, "
                f"value_and_grad(loss_fn, plan) takes fields of the state. {advice}"
            )
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


@named_arguments({"plan": "It is called as reduce_gradients(local_gradients, plan)."})
def reduce_gradients(
    local_gradients: LocalGradients,
    plan: Plan,
    *,
    bucket_size: int = BUCKET_SIZE,
    end_bucket_size: int = END_BUCKET_SIZE,
) -> tuple[Any, Any]:
    """Reduces the local gradients of one call of `value_and_grad(sync=False)`, or a sum of several.

    Call it inside your own `jax.jit`, before `state.apply_gradients` or `optimizer.update`.

    Args:
      local_gradients: the `LocalGradients` of one call, or the sum of several.
      plan: the plan that they were made with.
      bucket_size: elements of one bucket.
      end_bucket_size: as in `make_train_step`.

    Returns:
      `(loss, grads)`, or `((loss, aux), grads)` where the loss has aux: those of all examples
      together, however many each call had. Floats in aux are averaged over the calls by
      their numbers of examples (with `"per_device"`, by the weights of the loss); quotients of sums
      are divided once. For a sum or a maximum over the calls
      return `gshard.Reduced(x, "sum")` or `"max"`.

    Raises:
      GShardError: the gradients are reduced already, or were made with another plan.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> grad = gshard.value_and_grad(loss_fn, plan, sync=False)
      >>> local = grad(state.params, batch)[1] + grad(state.params, batch)[1]
      >>> loss, grads = gshard.reduce_gradients(local, plan)
    """
    if not isinstance(local_gradients, LocalGradients):
        raise GShardError(
            f"reduce_gradients was called with {shown(local_gradients)}. Pass the gradients of "
            "value_and_grad(loss_fn, plan, sync=False); those of sync=True are reduced already."
        )
    options = StepOptions(bucket_size=bucket_size, end_bucket_size=end_bucket_size)
    result = finish_reduction(local_gradients, plan, options)
    return _value(result.loss, (result.aux, local_gradients.aux is not None)), result.grads


def _value(loss: jax.Array, *more: tuple[Any, bool]) -> Any:
    """Returns `loss`, `(loss, x)` or `(loss, (x, y))`, with the outputs that were asked for."""
    asked = tuple(x for x, given in more if given)
    return (loss, asked[0] if len(asked) == 1 else asked) if asked else loss


def finish_reduction(sums: LocalGradients, plan: Plan, options: StepOptions) -> Gradients:
    """Computes the result of `GradientStage.reduced` from the sums of one call or several."""
    targets = accumulation_layouts(plan, sums.accumulate)
    structure = same_leaves(sums.grads, (x.path for x in targets), "the gradients are")
    leaves = jax.tree.leaves(sums.grads)
    for x, target in zip(leaves, targets, strict=True):
        if x.shape != (plan.group.devices, *target.shard_shape):
            raise GShardError(
                f"the local gradient of {target.path} has shape {x.shape}, and this plan makes "
                f"{(plan.group.devices, *target.shard_shape)}. Reduce it with the plan that it was "
                "made with."
            )
    order = list(range(len(leaves)))
    end = partial(reduce, plan=plan, accumulate=sums.accumulate, options=options, order=order)
    given = (leaves, sums.loss, sums.weight, sums.aux)
    grads, *more = _on_devices(end, given, reduce_out_specs(plan), plan)
    value, aux, weight, norm, numbers, finite = more
    grads = jax.tree.unflatten(structure, grads)
    return Gradients(grads, value, aux, weight, norm, {}, numbers, finite)


def mean_non_trainable(own: dict[str, Any], plan: Plan, options: StepOptions) -> dict[str, Any]:
    """Averages non-trainable state that differs by device; the result is in storage layouts."""
    end = partial(mean_over_devices, group=plan.group, first=options.sync_buffers)
    return pin_updates(_on_devices(end, own, jax.P(), plan), plan)


def _on_devices(end: Callable[[Any], Any], given: Any, out_specs: Any, plan: Plan) -> Any:
    """Runs `end` on each device's slice of arrays with a leading axis over the devices."""
    refuse_other_context(plan.mesh)
    return jax.shard_map(
        lambda own: end(jax.tree.map(lambda x: x[0], own)),
        mesh=plan.mesh,
        in_specs=(plan.device_spec,),
        out_specs=out_specs,
        axis_names=set(plan.group.axes),
        check_vma=False,
    )(given)
