"""The operations of `gshard.sequence`, which each device runs on its slices of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gshard._util.errors import warn
from gshard._util.named_calls import behind_call
from gshard.sequence.view import Call
from gshard.train.global_loss.by_examples import by_examples
from gshard.train.global_loss.mapped_calls import MappedDims, mapped_dims
from gshard.train.global_loss.placement import REPLICATED, Placement, sharded
from gshard.train.global_loss.registry import Decision, Evaluator, Given

_Found = tuple[Call, MappedDims | None]


def sequence_call(evaluator: Evaluator, eqn: Any, placements: Sequence[Placement]) -> _Found | None:
    """Returns the operation of `gshard.sequence` that devices run on their slices, if any.

    With it comes which dimensions `jax.vmap` has mapped. Otherwise the equation is evaluated by
    what it computes on one device: where no operand is sharded, and what a derivative has made of
    a call.
    """
    call = _call(evaluator, eqn, placements)
    if call is None:
        return None
    mapped = None
    if eqn.params["jaxpr"] is not call.jaxpr:
        mapped = mapped_dims(eqn, call)
        if mapped is None:
            return None
    shapes, partition = [v.aval.shape for v in eqn.invars], evaluator.partition
    fits = map(partition.fits, shapes, _operands(call, mapped, partition.zigzag))
    return (call, mapped) if all(fits) else None


def warn_of_transformed(evaluator: Evaluator, eqn: Any, placements: Sequence[Placement]) -> None:
    """Warns of a call whose inputs are all-gathered, because a derivative was made of it."""
    call = _call(evaluator, eqn, placements)
    if call is not None and eqn.params["jaxpr"] is not call.jaxpr:
        warn(
            f"{evaluator.place(eqn)} is transformed inside the loss, by jax.grad, jax.jvp or "
            "nested jax.vmap, so its inputs are all-gathered over the sequence axis and it is "
            "computed as on one device. Call it on the whole batch, and not inside a derivative "
            "in the loss."
        )


def _call(evaluator: Evaluator, eqn: Any, placements: Sequence[Placement]) -> Call | None:
    if evaluator.of_examples or not any(p.is_sharded for p in placements):
        return None
    return behind_call(eqn, Call, transformed=True)


def _operands(call: Call, mapped: MappedDims | None, zigzag: bool) -> list[Placement]:
    outer, dims = 2 if zigzag else 1, call.dims
    if mapped is not None:
        dims = [_moved(*pair) for pair in zip(dims, mapped.operands, strict=True)]
    return [REPLICATED if dim is None else sharded(dim, outer) for dim in dims]


def _moved(dim: int | None, mapped: int | None) -> int | None:
    """A dimension of an array to which a mapped one was added."""
    return dim if dim is None or mapped is None else dim + (mapped <= dim)


def decide_sequence_call(given: Given, call: Call, mapped: MappedDims | None) -> Decision:
    """Runs on the slices of each device."""
    avals, zigzag = call.jaxpr.in_avals, given.partition.zigzag
    of_batch = [x.shape[:1] == avals[0].shape[:1] for x in avals]
    if mapped is not None:
        of_batch = [x or d is not None for x, d in zip(of_batch, mapped.operands, strict=True)]
    axes = tuple(0 if x else None for x in of_batch)
    order = "zigzag" if zigzag else "contiguous"
    run_one = by_examples(partial(call.run, order=order), axes)
    if mapped is not None:
        run_one = mapped.folded(run_one, avals)
    result = call.result if mapped is None else _moved(call.result, mapped.result)

    def run(values: list[Any]) -> list[Any]:
        return [run_one(*values)]

    results = [sharded(result or 0, 2 if zigzag else 1)]
    return Decision(_operands(call, mapped, zigzag), results, run=run)
