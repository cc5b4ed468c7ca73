"""All-gathers parameters for one use, and re-gathers them in the backward pass of that use.

Without rematerialization by the user, JAX would save the gathered parameters for the backward pass.
With `reshard_after_forward` (ZeRO, section 7.2.2) the shards are saved instead, and the backward
pass gathers them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from gshard._util.jaxpr import with_inner
from gshard.train.fsdp.gather_bucket import GatherScope
from gshard.train.fsdp.lazy_param import LazyParam

# Primitives whose backward pass uses their operands as they are.
_SAVING = {"dot_general", "conv_general_dilated", "ragged_dot_general", "custom_vjp_call", "scan"}


def saves_operands(eqn: Any) -> bool:
    """Whether an equation has a backward pass that uses its operands as they are."""
    return eqn.primitive.name in _SAVING and not any(
        inner.primitive.name == "while" or "callback" in inner.primitive.name
        for inner in with_inner(eqn)
    )


def apply_gathered(
    fun: Callable[[Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
    scope: GatherScope,
    saves: bool,
) -> Sequence[Any]:
    """Calls `fun(values)` with gathered parameters, and saves only shards for the backward pass.

    `saves` says whether a backward pass of `fun` uses its operands as they are.
    """
    order_gathers(values, scope)
    reshards = [isinstance(v, LazyParam) and v.regathers for v in values]
    if not (saves and scope.saves and any(reshards)):
        return fun([gathered(v) for v in values])
    params = [v for v, one in zip(values, reshards, strict=True) if one]
    others = [gathered(v) for v, one in zip(values, reshards, strict=True) if not one]

    def call(others: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        rest, leaves = iter(others), iter(full)
        return fun([next(leaves if one else rest) for one in reshards])

    def forward(others: Sequence[Any], full: Sequence[Any]) -> tuple[Any, Any]:
        out, pullback = jax.vjp(call, others, full)
        saved, structure = jax.tree.flatten(pullback)
        which = [next((i for i, w in enumerate(full) if w is x), None) for x in saved]
        rest = [x for x, i in zip(saved, which, strict=True) if i is None]
        for i in which:
            if i is not None:
                params[i].bucket.to_regather.add(params[i].index)
        backward = partial(_backward, params, scope, which, structure)
        return out, jax.tree_util.Partial(backward, rest, list(full))

    run = jax.custom_vjp(call)
    run.defvjp(forward, lambda backward, cotangents: backward(cotangents))
    return run(others, [v.all_gather() for v in params])


def order_gathers(values: Sequence[Any], scope: GatherScope) -> None:
    """Makes the all-gathers of one use wait for the values that must be available before."""
    scope.record_use([v for v in values if not isinstance(v, LazyParam)])
    buckets = {v.bucket: None for v in values if isinstance(v, LazyParam) and v.is_ordered}
    if buckets:
        after = scope.forward_dependencies()
        for bucket in buckets:
            bucket.wait(after)


def _backward(
    params: Sequence[LazyParam],
    scope: GatherScope,
    which: Sequence[int | None],
    structure: Any,
    rest: Sequence[Any],
    full: Sequence[Any],
    cotangents: Sequence[Any],
) -> Any:
    """Runs what `jax.vjp` returned, after re-gathering the parameters among its saved arrays.

    Those of the last use of the forward pass are still gathered, and are used as they are. `which`
    says for each saved array which parameter it is; None for one of `rest`.
    """
    buckets = {params[i].bucket for i in which if i is not None}
    is_last = len(buckets) == 1 and scope.is_last_of_forward(next(iter(buckets)))
    # A use of parameters that are all re-gathered already is no gather, nor is one of none.
    there = not is_last and all(bucket.is_regathered for bucket in buckets)
    after = () if there else scope.backward_dependencies(cotangents)
    others = iter(rest)

    def full_param(i: int) -> Any:
        return full[i] if is_last else params[i].regather(after)

    saved = [next(others) if i is None else full_param(i) for i in which]
    return jax.tree.unflatten(structure, saved)(cotangents)


def gathered(value: Any) -> Any:
    """Returns the full array of a parameter, and anything else as it is."""
    return value.all_gather() if isinstance(value, LazyParam) else value
