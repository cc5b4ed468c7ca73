"""The operations of `gshard.sequence`, which each device runs on its slices of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gshard._util.named_calls import behind_call
from gshard.sequence.view import Call
from gshard.train.global_loss.by_examples import by_examples
from gshard.train.global_loss.placement import REPLICATED, Placement, sharded
from gshard.train.global_loss.registry import Decision, Evaluator, Given


def sequence_call(evaluator: Evaluator, eqn: Any, placements: Sequence[Placement]) -> Call | None:
    """Returns the operation of `gshard.sequence` that devices run on their slices, if any.

    Otherwise the equation is evaluated by what it computes on one device: where no operand is
    sharded, and what `jax.vmap` or a derivative has made of a call.
    """
    if evaluator.of_examples or not any(p.is_sharded for p in placements):
        return None
    call = behind_call(eqn, Call)
    if call is None:
        return None
    shapes, partition = [v.aval.shape for v in eqn.invars], evaluator.partition
    fits = map(partition.fits, shapes, _operands(call, partition.zigzag))
    return call if all(fits) else None


def _operands(call: Call, zigzag: bool) -> list[Placement]:
    outer = 2 if zigzag else 1
    return [REPLICATED if dim is None else sharded(dim, outer) for dim in call.dims]


def decide_sequence_call(given: Given, call: Call) -> Decision:
    """Runs on the slices of each device."""
    examples, zigzag = given.shapes[0][0], given.partition.zigzag
    axes = tuple(0 if shape[:1] == (examples,) else None for shape in given.shapes)
    order = "zigzag" if zigzag else "contiguous"

    def run(values: list[Any]) -> list[Any]:
        return [by_examples(partial(call.run, order=order), axes)(*values)]

    return Decision(_operands(call, zigzag), [sharded(call.result, 2 if zigzag else 1)], run=run)
