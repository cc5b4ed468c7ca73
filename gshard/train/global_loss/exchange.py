"""Decisions for a loss of which some parameters stay on the devices of an axis.

There an equation may have two operands that are sharded on different dimensions: tokens by
examples, and weights by experts. The one that costs least is moved, and a kept parameter is not
moved at all.

Source: the change from tokens by examples to tokens by experts is an all-to-all as in GShard
(Lepikhin et al., 2020), section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement, size_in_bytes
from gshard.train.global_loss.registry import Decision, Given

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "gather")


def decide_by_cost(
    given: Given,
    decide: Callable[[Given], Decision],
    candidates: Callable[[Given], Iterable[Decision]],
) -> Decision:
    """Returns the decision that moves no kept parameter, and among those the fewest bytes."""
    found = decide(given)
    if _cost(given, found)[1]:
        found = min([found, *candidates(given)], key=lambda x: _cost(given, x))
    slices = [p for p in given.placements if p.is_sharded]
    kept = all(p.kept for p in slices) and given.eqn.primitive.name not in _PRODUCTS
    results = [dataclasses.replace(p, kept=kept) if p.is_sharded else p for p in found.results]
    return dataclasses.replace(found, results=results)


def _cost(given: Given, found: Decision) -> tuple[int, int]:
    """How many kept parameters are moved, and about how many bytes a device sends."""
    kept = total = 0
    for v, old, new in zip(given.eqn.invars, given.placements, found.operands, strict=True):
        if old == new or old == REPLICATED:
            continue
        kept += old.kept
        total += _sent(size_in_bytes(v.aval), old, new, given.partition.parts)
    for v, place in zip(given.eqn.outvars, found.results, strict=True):
        if place == PARTIAL and PARTIAL not in given.placements:
            total += 2 * size_in_bytes(v.aval)
    return kept, total


def _sent(size: int, old: Placement, new: Placement, parts: int) -> int:
    if old.is_sharded and new.is_sharded:
        return size // parts  # an all-to-all
    return 2 * size if old == PARTIAL and new == REPLICATED else size
