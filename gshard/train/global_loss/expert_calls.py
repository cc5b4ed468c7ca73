"""The operation of `gshard.expert` that a device runs on the tokens and experts that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.named_calls import behind_call
from gshard.expert.dropless import Call
from gshard.train.comm.ragged import RowExchange
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement, sharded
from gshard.train.global_loss.registry import Decision, Given

_TOKENS = 3  # arrays of tokens: x, indices, weights


def expert_call(eqn: Any, placements: Sequence[Placement]) -> Call | None:
    """Returns the call of `gshard.expert.dropless` that is evaluated as such, if any.

    Otherwise the equation is evaluated by what it computes on one device: where no operand is
    sharded, and what `jax.vmap` or a derivative has made of a call.
    """
    found = behind_call(eqn, Call)
    return found if found is not None and any(p.is_sharded for p in placements) else None


def decide_expert_call(given: Given, call: Call) -> Decision:
    """Runs on each device's experts where they are kept, and on its tokens elsewhere."""
    leaves, partition = call.structure.num_leaves, given.partition
    if len(given.placements) != leaves + _TOKENS + 1:
        raise GShardError(
            f"{given.evaluator.place(given.eqn)}: the function passed to dropless closes over "
            "traced values. Pass what it needs in params, with the experts on dimension 0."
        )
    tokens = given.placements[leaves : leaves + _TOKENS]
    kept = {p.dim for p in given.placements[:leaves] if p.is_sharded and p.kept}
    if kept - {0}:
        raise GShardError(
            f"{given.evaluator.place(given.eqn)}: params are kept on dimension {max(kept)}, and "
            "the experts are dimension 0. Keep the dimension of the experts, such as "
            f"keep={{'experts/': ({given.evaluator.axes[0]!r}, 0)}}, or 1 for scanned layers."
        )
    place = next((p for p in tokens if p.is_sharded and p.dim < 2), REPLICATED)
    if kept and call.by == "all_to_all" and place.is_sharded:
        (axis,) = given.evaluator.axes
        native = given.evaluator.platform != "cpu"
        sent = replace(call, exchange=RowExchange(axis, partition.parts, native))
        operands = [sharded(0)] * leaves + [place] * _TOKENS + [REPLICATED]
        return Decision(operands, [place], run=lambda values: [sent(values)])
    if kept:
        experts = given.shapes[0][0] // partition.parts

        def run(values: list[Any]) -> list[Any]:
            return [call([*values[:-1], partition.index * experts])]

        operands = [sharded(0)] * leaves + [REPLICATED] * (_TOKENS + 1)
        return Decision(operands, [PARTIAL], run=run)
    operands = [REPLICATED] * leaves + [place] * _TOKENS + [REPLICATED]
    return Decision(operands, [place], run=lambda values: [call(values)])
