"""Rules of slices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard._util.arrays import is_key
from gshard._util.jaxpr import bind
from gshard.train.comm.examples import sum_partial
from gshard.train.global_loss.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
    first_sharded,
    sharded,
)
from gshard.train.global_loss.registry import Decision, Given, rule

_FEW = 4096  # positions of a sequence that are summed, not gathered


@rule("slice")
def slice_(given: Given) -> Decision | None:
    """Along the sharded dimension, a run of whole blocks, or few positions of a sequence."""
    place, params, dim = given.placements[0], given.params, given.placements[0].dim
    start, limit = params["start_indices"], params["limit_indices"]
    block = given.shapes[0][dim] // place.outer
    stride = params["strides"][dim] if params["strides"] else 1
    blocks, rest = divmod(limit[dim] - start[dim], block)
    first, inside = divmod(start[dim], block)
    if stride != 1 or rest or inside or not blocks:
        return _few_positions(given, range(start[dim], limit[dim], stride))
    if given.partition.zigzag and first % 2:  # the order of the devices would be reversed
        return None
    parts = given.partition.parts
    local = {
        "start_indices": _with(start, dim, start[dim] // parts),
        "limit_indices": _with(limit, dim, limit[dim] // parts),
    }
    return Decision([place], [sharded(dim, blocks)], local)


def _few_positions(given: Given, positions: range) -> Decision | None:
    """Sums what each device has of some positions, such as the first or the last."""
    (place,), partition, (shape,) = given.placements, given.partition, given.shapes
    if not positions or len(positions) > _FEW or 2 * len(positions) >= shape[place.dim]:
        return None
    if given.evaluator.of_examples or is_key(given.eqn.invars[0].aval):
        return None
    dim, size = place.dim, shape[place.dim] // (place.outer * partition.parts)
    runs: list[list[int]] = []  # an owner, and the first and the last position on it
    for position in positions:
        block, owner = divmod(position // size, partition.parts)
        owner = partition.parts - 1 - owner if partition.zigzag and block % 2 else owner
        at = block * size + position % size
        if runs and runs[-1][0] == owner and at == runs[-1][2] + positions.step:
            runs[-1][2] = at
        else:
            runs.append([owner, at, at])
    strides = given.params["strides"] or (1,) * len(shape)
    local = {
        "start_indices": _with(given.params["start_indices"], dim, 0),
        "limit_indices": _with(given.params["limit_indices"], dim, given.local(shape, place)[dim]),
        "strides": _with(strides, dim, 1),
    }

    def run(values: list[Any]) -> list[Any]:
        (x,) = bind(given.eqn, values, **local)
        pieces = []
        for owner, first, last in runs:
            piece = lax.slice_in_dim(x, first, last + 1, positions.step, dim)
            pieces.append(jnp.where(partition.index == owner, piece, jnp.zeros_like(piece)))
        return [sum_partial(jnp.concatenate(pieces, dim), given.evaluator.axes)]

    return Decision([place], [REPLICATED], run=run)


def _with(numbers: Any, i: int, value: int) -> tuple[int, ...]:
    return (*numbers[:i], value, *numbers[i + 1 :])


@rule("dynamic_slice")
def dynamic_slice(given: Given) -> Decision | None:
    """Along other dimensions."""
    place, sizes = given.placements[0], given.params["slice_sizes"]
    if not place.is_sharded or sizes[place.dim] != given.shapes[0][place.dim]:
        return None
    indices = [REPLICATED] * (len(given.placements) - 1)
    return Decision([place, *indices], [place], {"slice_sizes": given.local(sizes, place)})


@rule("dynamic_update_slice")
def dynamic_update_slice(given: Given) -> Decision | None:
    """Along other dimensions."""
    place = first_sharded(given.placements)
    old, new = given.shapes[:2]
    if old[place.dim] != new[place.dim] or not set(given.placements) <= {REPLICATED, place}:
        return None
    indices = [REPLICATED] * (len(given.placements) - 2)
    return Decision([place, place, *indices], [place])


@rule("gather")
def gather(given: Given) -> Decision | None:
    """The examples are in the indices, in both (a batching dimension), or in the operand."""
    numbers = given.params["dimension_numbers"]
    operand, indices = given.placements
    # Of the result, the dimensions that come from the indices, in their order.
    scattered = [d for d in range(len(given.result)) if d not in numbers.offset_dims]
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    if operand.is_sharded and operand.dim in batched:
        wanted = operand.on(batched[operand.dim])
        return _paired(operand, indices, wanted, scattered)
    if indices.is_sharded:
        last = len(given.shapes[1]) - 1
        if indices.dim == last:
            return None
        for of_operand, of_indices in batched.items():
            if indices.dim == of_indices:
                return _paired(indices.on(of_operand), indices, indices, scattered, operand)
        if operand == REPLICATED:
            return Decision(given.placements, [indices.on(scattered[indices.dim])])
    if operand.dim in numbers.collapsed_slice_dims:
        return _own_example(given, scattered)
    return _in_window(given) if indices == REPLICATED else None


def _paired(
    operand: Placement,
    indices: Placement,
    wanted: Placement,
    scattered: list[int],
    given: Placement | None = None,
) -> Decision | None:
    """Example i of the operand is indexed by example i of the indices."""
    if indices not in (REPLICATED, wanted) or given not in (None, REPLICATED, operand):
        return None
    return Decision([operand, wanted], [wanted.on(scattered[wanted.dim])])


def _own_example(given: Given, scattered: list[int]) -> Decision | None:
    """`x[arange(examples), y]`: example i takes from example i."""
    numbers, (operand, indices) = given.params["dimension_numbers"], given.placements
    known = given.positions[1]
    if known is None or operand.outer != 1 or operand.dim not in numbers.start_index_map:
        return None
    column = numbers.start_index_map.index(operand.dim)
    dim = dict(known.columns).get(column)
    if dim is None or given.shapes[1][dim] != given.shapes[0][operand.dim]:
        return None
    if indices not in (REPLICATED, sharded(dim)):
        return None
    run = partial(_at_own_rows, given, column, given.shapes[1][dim] // given.partition.parts)
    return Decision([operand, sharded(dim)], [sharded(scattered[dim])], run=run)


def _in_window(given: Given) -> Decision | None:
    """All examples are in every window."""
    numbers, place = given.params["dimension_numbers"], given.placements[0]
    sizes, dim = given.params["slice_sizes"], place.dim
    if dim in numbers.start_index_map or sizes[dim] != given.shapes[0][dim]:
        return None
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(given.shapes[0])) if d not in gone]
    result = place.on(numbers.offset_dims[kept.index(dim)])
    return Decision(given.placements, [result], {"slice_sizes": given.local(sizes, place)})


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(given: Given) -> Decision | None:
    """Each example into its own place; added ones also into places that they share."""
    return _into_own(given) or _into_own_row(given) or _added(given)


def _into_own(given: Given) -> Decision | None:
    """Along a batching dimension, or one that is whole in every window."""
    numbers = given.params["dimension_numbers"]
    operand, _, updates = given.shapes
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    scattered = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(operand)) if d not in gone]
    place = first_sharded(given.placements)
    for dim in range(len(operand)):
        if dim in batched:
            i = batched[dim]
            wanted = [place.on(dim), place.on(i), place.on(scattered[i])]
        elif dim in kept and dim not in numbers.scatter_dims_to_operand_dims:
            window = numbers.update_window_dims[kept.index(dim)]
            if updates[window] != operand[dim]:
                continue
            wanted = [place.on(dim), REPLICATED, place.on(window)]
        else:
            continue
        pairs = zip(given.placements, wanted, strict=True)
        if all(have in (REPLICATED, want) for have, want in pairs):
            return Decision(wanted, wanted[:1])
    return None


def _into_own_row(given: Given) -> Decision | None:
    """`x.at[arange(examples), y]`: example i into row i."""
    numbers, known = given.params["dimension_numbers"], given.positions[1]
    scattered = [d for d in range(len(given.shapes[2])) if d not in numbers.update_window_dims]
    if known is None or first_sharded(given.placements).outer != 1:
        return None
    for column, dim in known.columns:
        row, count = numbers.scatter_dims_to_operand_dims[column], given.shapes[1][dim]
        if row not in numbers.inserted_window_dims:  # a window may be of several rows
            continue
        wanted = [sharded(row), sharded(dim), sharded(scattered[dim])]
        pairs = zip(given.placements, wanted, strict=True)
        if count == given.shapes[0][row] and all(x in (REPLICATED, want) for x, want in pairs):
            size = count // given.partition.parts
            run = partial(_at_own_rows, given, column, size)
            return Decision(wanted, wanted[:1], run=run)
    return None


def _at_own_rows(given: Given, column: int, size: int, values: list[Any]) -> Sequence[Any]:
    """Gathers or scatters at rows that are counted from the first of this device."""
    x, at, *updates = values
    start = jnp.asarray(given.partition.index * size, at.dtype)
    return bind(given.eqn, [x, at.at[..., column].add(-start), *updates])


def _added(given: Given) -> Decision | None:
    """Examples are added into a table: every part gives a partial sum."""
    if given.eqn.primitive.name != "scatter-add":
        return None
    numbers = given.params["dimension_numbers"]
    operand, indices, updates = given.placements
    scattered = [d for d in range(len(given.shapes[2])) if d not in numbers.update_window_dims]
    if indices.is_sharded:
        place = indices
    elif updates.is_sharded and updates.dim in scattered:
        place = updates.on(scattered.index(updates.dim))
    else:
        return None
    last = len(given.shapes[1]) - 1
    if place.dim >= last or place.dim in numbers.scatter_indices_batching_dims:
        return None
    wanted = [PARTIAL, place, place.on(scattered[place.dim])]
    if operand.is_sharded or indices not in (REPLICATED, place):
        return None
    return Decision(wanted, [PARTIAL]) if updates in (REPLICATED, wanted[2]) else None
