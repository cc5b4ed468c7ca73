"""The operations of `gshard.sequence`, which each device runs on its slices of a sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

from gshard._util.jaxpr import JIT
from gshard.sequence.view import Call, call_of
from gshard.train.global_loss.by_examples import by_examples
from gshard.train.global_loss.placement import sharded
from gshard.train.global_loss.registry import Decision, Given


def sequence_call(eqn: Any) -> Call | None:
    """Returns the operation of `gshard.sequence` that an equation is a call of."""
    return call_of(eqn.params["name"]) if eqn.primitive.name == JIT else None


def decide_sequence_call(given: Given, call: Call) -> Decision | None:
    """Runs on the slices of each device, if any operand is sharded by slices."""
    evaluator = given.evaluator
    if evaluator.of_examples or not any(p.is_sharded for p in given.placements):
        return None
    examples = given.shapes[0][0]
    axes = tuple(0 if shape[0] == examples else None for shape in given.shapes)

    zigzag = given.partition.zigzag
    outer, order = (2, "zigzag") if zigzag else (1, "contiguous")

    def run(values: list[Any]) -> list[Any]:
        return [by_examples(partial(call.run, order=order), axes)(*values)]

    operands = [sharded(dim, outer) for dim in call.dims]
    return Decision(operands, [sharded(call.result, outer)], run=run)
