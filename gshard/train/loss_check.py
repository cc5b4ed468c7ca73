"""Checks that a loss is a mean over examples, which averaging the losses of devices relies on.

It is for `loss_semantics="per_device"`; a loss of the global batch may be anything.

On each device it compares the loss of n examples with the mean of n losses, each of a batch that
repeats one example n times. One compiled loop evaluates all of them, so that an example gives the
same bits at any position, also in bfloat16. A sum passes, but not with the losses of both halves.
Of a `Weighted` the sums and the weights are added up before they are divided.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core

from gshard._util.errors import warn
from gshard._util.jaxpr import (
    all_equations,
    bind,
    body_of,
    called,
    evaluate,
    opened,
    scan_sizes,
    with_inner,
)
from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import group_index, reduce_scalar
from gshard.train.eval_step import evaluate_on_devices
from gshard.train.global_loss.sequences import Sequences
from gshard.train.loss import Weighted
from gshard.train.options import TrainStepOptions
from gshard.train_state import Components, PureLoss

VARIABLE = "GSHARD_CHECK_LOSS"
_MOST = 8  # examples of a device: few differ more from each other than the means of many do
_REPLACED = {"random_bits", "debug_callback", "debug_print"}
# They draw in ways that a constant cannot replace, or are seen from outside.
_UNKNOWN = {"random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform", "io_callback"}


class _NotComparableError(Exception):
    """The check cannot judge this loss."""


def is_on(options: TrainStepOptions) -> bool:
    """Whether a step checks its loss; the environment variable can turn it off."""
    asked = options.loss_semantics == "per_device" and options.check_loss
    return asked and os.environ.get(VARIABLE, "1") != "0"


def check_mean(
    loss: PureLoss, parts: Components, batch: Any, options: TrainStepOptions, plan: Plan
) -> None:
    """Warns if the loss is not a mean over examples; a loss that cannot be checked passes."""
    devices, k = plan.group.batch_shards, options.micro_batches
    examples = next(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)) // devices
    count = min(examples // k, _MOST) // 2 * 2
    parts = dataclasses.replace(parts, opt_state=None, step=None)
    given = jax.tree.leaves((parts, batch))
    if devices * k == 1 or not count or any(isinstance(x, jax_core.Tracer) for x in given):
        return
    tolerances: list[float] = []
    weighted: list[bool] = []

    def value(params: Any, non_trainable: Any, examples: Any) -> Any:
        out, _ = loss(params, non_trainable, examples, options.rng)
        out = out[0] if options.has_aux else out
        weighted.append(isinstance(out, Weighted))
        total, weight = (out.sum, out.weight) if weighted[-1] else (out, 1.0)
        return jnp.asarray(total), jnp.asarray(weight, jnp.float32)

    def without_draws(*args: Any) -> jax.Array:
        closed = jax.make_jaxpr(value)(*args)
        _check_comparable(closed.jaxpr, [name for name, _ in plan.group.model_axes])
        tolerances.append(_tolerance(closed.jaxpr))
        total, weight = _without_draws(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        return jnp.stack([total.astype(jnp.float32), weight])

    def on_device(evaluate: Callable[..., Any], batch: Any) -> Any:
        every = examples // count
        few = jax.tree.map(lambda x: x[::every][:count] if jnp.ndim(x) else x, batch)
        order = np.arange(count)

        def losses(*picks: Any) -> jax.Array:
            def one(_: None, pick: jax.Array) -> tuple[None, jax.Array]:
                picked = jax.tree.map(lambda x: x[pick] if jnp.ndim(x) else x, few)
                return None, evaluate(picked, per_call=True)

            return jax.lax.scan(one, None, jnp.stack(picks))[1]

        def combined(found: jax.Array) -> jax.Array:
            totals, weights = found.T
            if weighted[-1]:  # examples without weight count as nothing, even if 0 / 0 is NaN
                totals = jnp.where(weights == 0, 0, totals)
            return totals.sum() / weights.sum()

        found = losses(order, *(np.full(count, i) for i in order))
        together, single = combined(found[:1]), combined(found[1:])
        halves = combined(losses(order[: count // 2], order[count // 2 :]))
        tolerance = tolerances[-1]
        scale = jnp.maximum(jnp.maximum(abs(together), abs(single)), abs(halves))
        off = abs(together - single) / (scale + 1e-2) / tolerance
        # Halves have other shapes, which may round differently.
        grows = abs(halves - single) / (scale + tolerance) / 0.05
        # If the loss of one example is not finite, a mean is not either; 0 / 0 of an empty mask
        # would be left out.
        worst = jnp.where(jnp.isfinite(single), jnp.maximum(off, grows), jnp.inf)
        worst = jnp.where(jnp.isfinite(together), worst, 0)
        other = jnp.where(grows > off, halves, single)
        axes = plan.group.batch_axes
        most = reduce_scalar(worst, axes, "max")
        mine = group_index(axes)
        chosen = reduce_scalar(jnp.where(worst == most, mine, devices), axes, "min")
        numbers = [jnp.where(mine == chosen, x, 0) for x in (together, other)]
        return most, *(reduce_scalar(x, axes) for x in numbers)

    try:
        with warnings.catch_warnings():  # the step itself gives these warnings
            warnings.simplefilter("ignore")
            dims, order = plan.sequence_dims(batch), plan.sequence_order
            fun = Sequences(plan.group, dims, None, False, order).complete(without_draws)
            run = partial(evaluate_on_devices, fun, on_device, jax.P(), plan=plan)
            traced = jax.jit(run).trace(parts, batch)
    except Exception:  # the loss does not take such a batch, or the step will report the error
        return
    worst, together, other = jax.device_get(traced.lower().compile()(parts, batch))
    if worst > 1:
        effect = (
            f"gshard averages the loss over devices and micro-batches, so training on {devices} "
            f"devices with {k} micro-batch{'es' * (k > 1)} does not match single-device training."
        )
        end = "If this is intended, pass check_loss=False."
        if weighted[-1]:
            warn(
                "the loss returns a gshard.Weighted whose values do not add up over examples: for "
                f"{count} examples of one device sum / weight is {together:.6g}, but with the sums "
                f"and weights of subsets of them added up it is {other:.6g}. {effect} Return the "
                "sum over the examples and their total weight, without dividing: "
                f"gshard.Weighted((losses * mask).sum(), mask.sum()). {end}"
            )
            return
        subsets = f"the mean of the losses of subsets of them is {other:.6g}"
        if not np.isfinite(other):
            subsets = f"the loss of one of them alone is {other:.6g}"
        warn(
            f"the loss is not a mean over examples: for {count} examples of one device it is "
            f"{together:.6g}, and {subsets}. {effect} In place of a masked mean, (losses * "
            "mask).sum() / mask.sum(), return gshard.Weighted((losses * mask).sum(), mask.sum()); "
            f"give a BatchNorm axis_name=plan.data_axes. {end}"
        )


def _tolerance(jaxpr: Any) -> float:
    """Returns the largest relative difference that rounding can cause."""
    loss = jaxpr.outvars[0].aval
    if not jnp.issubdtype(loss.dtype, jnp.floating) or loss.shape:
        raise _NotComparableError
    results = (v.aval for eqn in all_equations(jaxpr) for v in eqn.outvars)
    dtypes = {x.dtype for x in results if hasattr(x, "dtype")}
    sizes = (dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    inside = {1: 5e-2, 2: 1e-3}.get(min(sizes, default=4), 1e-4)
    return max(inside, 2 * float(jnp.finfo(loss.dtype).eps))


def _check_comparable(jaxpr: Any, model_axes: Sequence[str]) -> None:
    """Refuses a loss that communicates examples by itself, and draws that cannot be replaced."""
    for eqn in all_equations(jaxpr):
        name = eqn.primitive.name
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        names = {axis for axis in axes if isinstance(axis, str)}
        if name in _UNKNOWN or (name != "axis_index" and names - set(model_axes)):
            raise _NotComparableError


def _without_draws(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a jaxpr with one constant for all random bits, and without what it prints.

    The constant is small, so that a dropout keeps everything up to a rate of 7/8.
    """
    return evaluate(jaxpr, consts, args, _evaluate_without_draws)


def _evaluate_without_draws(eqn: Any, values: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if not any(inner.primitive.name in _REPLACED for inner in with_inner(eqn)):
        return bind(eqn, values)
    if name == "random_bits":
        (bits,) = (v.aval for v in eqn.outvars)
        return [jnp.full(bits.shape, int("20" * bits.dtype.itemsize, 16), bits.dtype)]
    if name in _REPLACED:
        return []
    inner = called(eqn)
    if inner is not None:
        return _without_draws(*inner, *values)
    if name == "cond":
        branches = [partial(_without_draws, *opened(body)) for body in eqn.params["branches"]]
        return jax.lax.switch(values[0], branches, *values[1:])
    if name == "scan":
        body, consts = body_of(eqn)
        fixed, carried, _ = scan_sizes(eqn)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            out = _without_draws(body, consts, *values[:fixed], *carry, *x)
            return out[:carried], out[carried:]

        options = {name: eqn.params[name] for name in ("length", "reverse")}
        first = fixed + carried
        carry, stacked = jax.lax.scan(step, values[fixed:first], values[first:], **options)
        return [*carry, *stacked]
    raise _NotComparableError  # such as a loop that draws until it likes what it drew
