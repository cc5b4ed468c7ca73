"""Collectives that the loss calls by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from gshard._util.errors import GShardError
from gshard._util.jaxpr import COLLECTIVES, with_inner
from gshard.train.global_loss.placement import Placement, sharded
from gshard.train.global_loss.registry import Decision, Given, partial_rule, rule
from gshard.train.global_loss.transfers import names_in

_OF_AN_AXIS = {*COLLECTIVES, "axis_index", "pvary"}
# all-reductions, of which those of replicated values run as they are written
_SUMS = ("psum", "psum_invariant")
_OF_ONE_DEVICE = ("axis_index", "ppermute", "all_to_all", "reduce_scatter", "all_gather")


def check_own_collective(given: Given) -> None:
    """Refuses a collective whose meaning depends on which examples a device has.

    Raises:
      GShardError: it names a device, or combines the examples of the devices.
    """
    _check(given, given.eqn, any(p.is_sharded for p in given.placements))


def check_body_as_traced(given: Given, of_examples: bool = False) -> None:
    """Refuses such a collective in a body that runs as it was traced.

    `of_examples`: each device runs the body for its own examples.

    Raises:
      GShardError: as `check_own_collective`.
    """
    for eqn in with_inner(given.eqn):
        if is_own_collective(eqn, given.evaluator.axes):
            _check(given, eqn, of_examples)


def is_own_collective(eqn: Any, axes: Sequence[str]) -> bool:
    """Whether an equation communicates over one of the data axes."""
    return eqn.primitive.name in _OF_AN_AXIS and bool(set(names_in(eqn.params)) & set(axes))


def sum_size(eqn: Any) -> int:
    """The number of devices that a sum runs over."""
    return math.prod(lax.axis_size(axis) for axis in names_in(eqn.params))


def is_own_sum(eqn: Any, axes: Sequence[str]) -> bool:
    """Whether an equation sums over data axes."""
    return eqn.primitive.name in _SUMS and is_own_collective(eqn, axes)


def sum_error(place: str) -> GShardError:
    """The error for a sum over devices of what is already that of the global batch."""
    return GShardError(
        f"{place} sums over the devices a value that is already that of the whole batch, so the "
        "result would be too large by a factor of the number of devices. Remove this sum: write "
        "the loss as for one device. A mean (lax.pmean) and a quotient of two such sums may stay. "
        "For a loss of each device's own examples pass loss_semantics='per_device'."
    )


def _check(given: Given, eqn: Any, of_examples: bool) -> None:
    name, names = eqn.primitive.name, names_in(eqn.params)
    data = (*given.evaluator.axes, *given.evaluator.other_axes)
    over = [axis for axis in names if axis in data]
    if name in _OF_ONE_DEVICE or of_examples or len(over) < len(names):
        if not given.evaluator.of_examples:
            raise GShardError(
                f"{given.evaluator.place(eqn)} runs over {', '.join(map(repr, over))}. The loss "
                "sees full sequences: write it without the collective, as for one device. "
                "gshard.sequence has operations that know the slices of the devices."
            )
        raise GShardError(
            f"{given.evaluator.place(eqn)} runs over {', '.join(map(repr, over))}, a data "
            "axis. The loss is that of the global batch, which no device has by itself: write it "
            "without the collective, as for one device. For a loss of each device's own examples "
            "pass loss_semantics='per_device'."
        )


@rule("ppermute", "psum_invariant", "pvary")
@partial_rule("psum", "psum_invariant", "ppermute", "all_gather", "pvary")
def over_model_axes(given: Given) -> Decision:
    """Inside a `shard_map` over other axes: each entry with the same entry of other devices."""
    return Decision(given.placements, given.placements)


@rule("all_gather", "reduce_scatter")
def along_model_axes(given: Given) -> Decision | None:
    """Along any dimension; along that of the examples the blocks of other devices follow."""
    place, params = given.placements[0], given.params
    gathers = given.eqn.primitive.name == "all_gather"
    along: int = params["all_gather_dimension" if gathers else "scatter_dimension"]
    if params["axis_index_groups"] is not None or not (params["tiled"] or gathers):
        return None
    if not params["tiled"]:
        return given.all(place, place.on(place.dim + (along <= place.dim)))
    if place.dim != along:
        return given.all(place)
    return _in_blocks(given, place, params["axis_size"], gathers)


@rule("all_to_all")
def between_dimensions(given: Given) -> Decision | None:
    """From one dimension to another, of which the examples may be one."""
    place, params = given.placements[0], given.params
    split, concat = params["split_axis"], params["concat_axis"]
    if not params["tiled"] or params["axis_index_groups"] is not None or split == concat:
        return None
    if place.dim not in (split, concat):
        return given.all(place)
    return _in_blocks(given, place, sum_size(given.eqn), place.dim == concat)


def _in_blocks(given: Given, place: Placement, devices: int, more: bool) -> Decision | None:
    """Blocks of several devices follow each other on the sharded dimension, or are split again."""
    if given.partition.zigzag:
        return None
    if more:
        return given.all(place, sharded(place.dim, place.outer * devices))
    if place.outer % devices:
        return None
    return given.all(place, sharded(place.dim, place.outer // devices))
