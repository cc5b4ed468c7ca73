"""One use of divided leaves: made whole for it, and made whole again in its backward pass.

Where nothing is rematerialised by the user, what is saved for the backward pass would hold the
leaves that were made whole. With `reshard_after_forward` (ZeRO, section 7.2.2) it holds the parts,
and the backward pass gathers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from gshard._util.jaxpr import with_inner
from gshard.train.fsdp.gather_bucket import Scope
from gshard.train.fsdp.lazy_param import LazyParam

# Their backward pass uses operands as they are.
_SAVING = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "custom_vjp_call",
    "scan",
)


def saves_operands(eqn: Any) -> bool:
    """Whether a backward pass of this equation uses operands as they are, and there is one."""
    return eqn.primitive.name in _SAVING and not any(
        inner.primitive.name == "while" or "callback" in inner.primitive.name
        for inner in with_inner(eqn)
    )


def on_gathered(
    fun: Callable[[Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
    scope: Scope,
    saves: bool,
) -> Sequence[Any]:
    """`fun(values)`, made whole; of what it saves, leaves that reshard are given back as parts.

    `saves`: whether a backward pass of `fun` uses its operands as they are.
    """
    hold_back(values, scope)
    reshard = [isinstance(v, LazyParam) and v.gathers_again for v in values]
    if not (saves and scope.saved and any(reshard)):
        return fun([gathered(v) for v in values])
    again = [v for v, one in zip(values, reshard, strict=True) if one]
    others = [gathered(v) for v, one in zip(values, reshard, strict=True) if not one]

    def call(others: Sequence[Any], wholes: Sequence[Any]) -> Sequence[Any]:
        rest, leaves = iter(others), iter(wholes)
        return fun([next(leaves if one else rest) for one in reshard])

    def forward(others: Sequence[Any], wholes: Sequence[Any]) -> tuple[Any, Any]:
        out, pullback = jax.vjp(call, others, wholes)
        held, structure = jax.tree.flatten(pullback)
        which = [next((i for i, w in enumerate(wholes) if w is x), None) for x in held]
        rest = [x for x, i in zip(held, which, strict=True) if i is None]
        for i in which:
            if i is not None:
                again[i].bucket.comes_back(again[i].place)
        backward = partial(_backward, again, scope, which, structure)
        return out, jax.tree_util.Partial(backward, rest, list(wholes))

    run = jax.custom_vjp(call)
    run.defvjp(forward, lambda backward, cotangents: backward(cotangents))
    return run(others, [v.whole() for v in again])


def hold_back(values: Sequence[Any], scope: Scope) -> None:
    """Holds back the leaves among the operands of one use."""
    scope.used_with([v for v in values if not isinstance(v, LazyParam)])
    buckets = {v.bucket: None for v in values if isinstance(v, LazyParam) and v.waits}
    if buckets:
        after = scope.forward()
        for bucket in buckets:
            bucket.wait(after)


def _backward(
    leaves: Sequence[LazyParam],
    scope: Scope,
    which: Sequence[int | None],
    structure: Any,
    rest: Sequence[Any],
    wholes: Sequence[Any],
    cotangents: Sequence[Any],
) -> Any:
    """What `jax.vjp` gave, once those of its saved arrays that are whole leaves are made again.

    Leaves of the last use of a forward pass come back first, and are kept. `which` says of each
    saved array which leaf it is; None: one of `rest`.
    """
    buckets = {leaves[i].bucket for i in which if i is not None}
    turning = len(buckets) == 1 and scope.turns(next(iter(buckets)))
    # What is back already does not count as a gather; nor does a use of no leaf.
    there = not turning and all(bucket.is_back for bucket in buckets)
    after = () if there else scope.backward(cotangents)
    saved = iter(rest)

    def leaf(i: int) -> Any:
        return wholes[i] if turning else leaves[i].regathered(after)

    held = [next(saved) if i is None else leaf(i) for i in which]
    return jax.tree.unflatten(structure, held)(cotangents)


def gathered(value: Any) -> Any:
    """A leaf made whole; anything else as it is."""
    return value.whole() if isinstance(value, LazyParam) else value
