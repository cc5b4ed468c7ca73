"""`make_eval_step`: evaluates a function of full parameters on a sharded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arguments import named_arguments
from gshard._util.arrays import at_least_float32
from gshard._util.closure import OutsideValues
from gshard._util.errors import GShardError, place_of, some, warn
from gshard._util.in_flight import limit_in_flight
from gshard._util.pytree import same_leaves
from gshard._util.validation import shown
from gshard.data.batch import check_examples, shard_batch
from gshard.sharding.mesh import refuse_other_context
from gshard.sharding.plan import Plan, check_call, check_state, refuse_original
from gshard.sharding.validate import TreeChecker
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.collectives import reduce_scalar
from gshard.train.comm.loop_order import in_loop_order
from gshard.train.fsdp.gather_bucket import GatherScope, gather_specs, grad_sinks
from gshard.train.fsdp.interpreter import with_sharded_params
from gshard.train.global_loss.experts import Experts, kept_dims, refuse_per_device
from gshard.train.global_loss.sequences import Sequences
from gshard.train.global_loss.shares import GlobalBatch
from gshard.train.loss import (
    Weighted,
    as_sums,
    check_reductions,
    has_reduction,
    is_numeric,
    reduce_sums,
)
from gshard.train.made_in_loop import MadeInLoop
from gshard.train.non_trainable import non_trainable_layouts, non_trainable_uses, to_storage
from gshard.train.options import LossSemantics, StepOptions, check_gather_limit, most_gathered
from gshard.train.padding_mask import MaskCheck
from gshard.train.same_program import ProgramCheck
from gshard.train_state import Components

_INSTEAD = {
    "plan": "It is called as make_eval_step(fn, plan).",
    "rng": "A key can be part of the batch: {**batch, 'key': jax.random.key(0)}.",
    **dict.fromkeys(("has_aux", "mutable"), "The function returns whatever the evaluation does."),
}


@named_arguments(_INSTEAD)
def make_eval_step(
    fn: Callable[..., Any],
    plan: Plan,
    *,
    loss_semantics: LossSemantics = "global",
    gather_limit: int | None = None,
) -> Callable[..., Any]:
    """Compiles a function of the full parameters and a batch, for evaluation.

    Args:
      fn: Linen `fn(params, batch)`, NNX `fn(model, batch)`. Fields of the state that a Linen
        function names are passed as keyword arguments, such as `batch_stats`; no `rng` is. It
        returns a tree of numbers and arrays, computed from the whole batch. With `"per_device"`
        they are floating scalars (means over a device's examples), `gshard.Weighted`,
        `gshard.Reduced`, and arrays with one entry per example.
      plan: the plan of `shard_train_state`.
      loss_semantics: `"global"`: outputs are those of the whole batch, as on one device; so is
        `"per_micro_batch"`. `"per_device"`: each device computes those of its own examples, which
        are combined.
      gather_limit: as in `make_train_step`.

    Returns:
      `f(state, batch)`, for NNX `f(model, batch)`. It returns the same tree of global arrays. Those
      with one entry per example stay sharded over the devices.

      Changes that `fn` makes to an NNX model are dropped, with a warning. Return what you need of
      them.

    Raises:
      GShardError: at the call, for a batch, state or output that does not fit.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> evaluate = gshard.make_eval_step(loss_fn, plan)
      >>> float(evaluate(state, batch))
      4096.0
    """
    check_call(fn, plan, "make_eval_step(fn, plan)")
    check_gather_limit(plan, StepOptions(loss_semantics=loss_semantics, gather_limit=gather_limit))
    is_global, limit = loss_semantics != "per_device", most_gathered(plan, gather_limit)
    name = f"the eval step of {place_of(fn)}"

    def run(parts: Components, batch: Any) -> Any:
        pure = plan.kind.loss(fn, (), parts.static)
        shards = plan.group.batch_shards
        examples = check_examples(batch, shards, 1) // shards
        structure: list[Any] = []  # of what fn returned

        def outputs(params: Any, non_trainable: Any, batch: Any) -> Any:
            out, changed = pure(params, non_trainable, batch, None)
            if kept := changed.keys() - plan.kind.random_paths(plan.template):
                warn(
                    f"{name} changes {some(sorted(kept))} of the model, and an evaluation keeps no "
                    "change. If batch statistics cause it, call model.eval() before the "
                    "evaluation. Otherwise return what you need, such as metrics.compute()."
                )
            elif changed and (found := plan.kind.dropouts(parts)):
                warn(
                    f"{name} drops entries in {some(found)}, which is in train mode. Call "
                    "model.eval() before the evaluation, and model.train() after it."
                )
            others = check_reductions(out, None if is_global else batch, "the evaluation output")
            for path, x in others:
                if not isinstance(x, Weighted) and not is_numeric(x):
                    raise GShardError(
                        f"the evaluation output {path!r} is {shown(x)}: return numbers and arrays."
                    )
            return out

        refuse_per_device(plan.group, is_global)
        layouts = non_trainable_layouts(parts.non_trainable, plan)
        experts = Experts(plan.group, kept_dims((plan.params, layouts)), limit)
        dims = plan.sequence_dims(batch)
        sequences = Sequences(plan.group, dims, limit, is_global, plan.sequence_order)
        global_batch, per_example = GlobalBatch(plan.group, limit=limit), list[bool]()

        def of_global_batch(params: Any, non_trainable: Any, batch: Any) -> Any:
            of_examples = experts.complete(sequences.complete(outputs))
            inside = (lambda: experts.own) if experts.is_on else None
            found, own = global_batch.outputs(of_examples, (params, non_trainable), batch, inside)
            per_example[:] = own
            return found

        def on_device(evaluate: Callable[..., Any], batch: Any) -> Any:
            flat, tree = jax.tree.flatten(evaluate(batch), is_leaf=has_reduction)
            structure.append(tree)
            if is_global:
                found = [(x, not own) for x, own in zip(flat, per_example, strict=True)]
            else:
                found = [_over_devices(x, examples, plan) for x in flat]
            means = {i: plan.output(x) for i, (x, is_mean) in enumerate(found) if is_mean}
            return means, {i: plan.output(x) for i, (x, is_mean) in enumerate(found) if not is_mean}

        specs = (jax.P(), plan.batch_spec)
        fun = of_global_batch if is_global else sequences.complete(outputs)
        means, arrays = evaluate_on_devices(fun, on_device, specs, parts, batch, plan)
        return jax.tree.unflatten(structure[-1], [x for _, x in sorted((means | arrays).items())])

    jitted = jax.jit(run)
    check = TreeChecker(plan.abstract_components().params, "the parameters are")
    check_program, check_mask = ProgramCheck(plan, name), MaskCheck(name, of_examples="sharded")
    made = MadeInLoop(plan, "make_eval_step", fn, (loss_semantics, gather_limit))
    outside, call = OutsideValues(fn, place_of(fn)), f"eval_step({plan.kind.arguments[0]}, batch)"

    @named_arguments({"*": "It is called as f(state, batch), with NNX as f(model, batch)."}, name)
    def eval_step(state: Any, batch: Any) -> Any:
        check_state(state, plan, call, inference=True)
        refuse_original(state, plan, call)
        parts = plan.kind.split_inference(state)
        check(parts.params)
        batch = shard_batch(batch, plan)
        outside.look(batch)
        structure = jax.tree.structure(parts)
        check_program(structure, (parts, batch), lambda: jitted.trace(parts, batch))
        check_mask(batch, lambda: jitted.trace(parts, batch), len(jax.tree.leaves(parts)))
        results = check_program.run(jitted, parts, batch)
        limit_in_flight(results)
        made.count(results)
        return results

    return eval_step


def evaluate_on_devices(
    fun: Callable[..., Any],
    on_device: Callable[..., Any],
    out_specs: Any,
    parts: Components,
    batch: Any,
    plan: Plan,
) -> Any:
    """Runs `on_device(evaluate, examples)` on every device; `out_specs` are those of its results.

    `evaluate(examples)` calls `fun(params, non_trainable, examples)` with full parameters, each
    all-gathered at its first use. Inside a loop pass `per_call=True`; otherwise XLA gathers
    everything before the loop.
    """
    refuse_other_context(plan.mesh)
    stored = jax.tree.leaves(plan.params)
    n = len(stored)
    structure = same_leaves(parts.params, (x.path for x in stored), "the parameters are")
    layouts = non_trainable_layouts(parts.non_trainable, plan)
    more, more_structure = jax.tree.flatten(to_storage(parts.non_trainable, layouts, plan))
    uses = [*gather_specs(stored, stored), *non_trainable_uses(layouts)]

    def with_leaves(leaves: list[jax.Array], examples: Any) -> Any:
        params = jax.tree.unflatten(structure, leaves[:n])
        return fun(params, jax.tree.unflatten(more_structure, leaves[n:]), examples)

    def run(leaves: list[jax.Array], batch: Any) -> Any:
        sinks = grad_sinks(leaves, uses)

        def evaluate(examples: Any, per_call: bool = False) -> Any:
            now = leaves
            if per_call:
                shards = {i: leaves[i] for i, use in enumerate(uses) if use is not None}
                shards, examples = jax.lax.optimization_barrier((shards, examples))
                now = [shards.get(i, x) for i, x in enumerate(leaves)]
            with GatherScope(sync=False, bucket_size=BUCKET_SIZE) as scope:
                return with_sharded_params(
                    with_leaves, uses, plan.group.axes, now, sinks, examples, scope=scope
                )

        return on_device(evaluate, batch)

    mapped = jax.shard_map(
        in_loop_order(run, plan.group),
        mesh=plan.mesh,
        in_specs=(
            [x.data_spec for x in jax.tree.leaves((stored, layouts))],
            plan.batch_specs(batch),
        ),
        out_specs=out_specs,
        axis_names=set(plan.group.axes),
        check_vma=False,
    )
    return mapped([*jax.tree.leaves(parts.params), *more], batch)


def _over_devices(x: Any, examples: int, plan: Plan) -> tuple[jax.Array, bool]:
    """Returns one device's output, averaged if it is a mean, and whether it is a mean."""
    axes, shards = plan.group.batch_axes, plan.group.batch_shards
    if has_reduction(x):
        return reduce_sums(as_sums(x, jnp.float32(1)), shards, axes), True
    x = jnp.asarray(x)
    if not x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
        return (reduce_scalar(at_least_float32(x), axes) / shards).astype(x.dtype), True
    if x.ndim and x.shape[0] == examples:
        return x, False
    raise GShardError(
        f"an evaluation output of shape {x.shape} and dtype {x.dtype} is neither a floating mean, "
        f"nor a gshard.Weighted, nor an array with one entry for each of a device's {examples} "
        'examples. Choose a reduction over the batch, such as gshard.Reduced(x, "sum").'
    )
