"""Rules of equations that act entry by entry, reorder dimensions, or reduce them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from gshard.train.comm.examples import extreme_of_examples
from gshard.train.global_loss.extremes import extreme_for_next
from gshard.train.global_loss.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
    agree,
    first_sharded,
    sharded,
)
from gshard.train.global_loss.registry import Decision, Given, rule

ENTRY_BY_ENTRY = tuple(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
    le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
    one_minus_square or polygamma polynomial
    population_count pow random_clone random_fold_in random_seed real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    threefry2x32 xor zeta""".split()
)
_ALONG = "approx_top_k cumlogsumexp cummax cummin cumprod cumsum rev sort top_k".split()
_AXES = ("axis", "dimension", "dimensions", "reduction_dimension")


def acts_by_entry(eqn: Any) -> bool:
    """Whether each entry of the result comes from the same entry of the operands."""
    if eqn.primitive.name == "bitcast_convert_type":
        return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    if eqn.primitive.name == "random_fold_in":  # of many numbers, unsafe_rbg draws from the first
        return "urbg" not in str(eqn.invars[0].aval.dtype)
    return eqn.primitive.name in ENTRY_BY_ENTRY


@rule(*ENTRY_BY_ENTRY)
def entry_by_entry(given: Given) -> Decision | None:
    """Every result has the rank of the operands; scalars and dimensions of size 1 are shared."""
    place, wanted = first_sharded(given.placements), []
    if not acts_by_entry(given.eqn):
        return None
    for shape, placement in zip(given.shapes, given.placements, strict=True):
        if shape == ():
            wanted.append(REPLICATED)
        elif len(shape) != len(given.result):
            return None
        elif shape[place.dim] == given.result[place.dim]:
            wanted.append(place)
        elif placement == REPLICATED and shape[place.dim] == 1:
            wanted.append(REPLICATED)
        else:
            return None
    if not agree(given.placements, place):
        return None
    return Decision(wanted, [place] * len(given.eqn.outvars))


@rule("optimization_barrier")
def barrier(given: Given) -> Decision:
    """Nothing mixes."""
    return Decision(given.placements, given.placements)


@rule("bitcast_convert_type")
def bitcast(given: Given) -> Decision | None:
    """Between dtypes of different size the last dimension changes."""
    return given.all(given.placements[0]) if given.shapes[0] == given.result else None


@rule("broadcast_in_dim")
def broadcast(given: Given) -> Decision | None:
    """The dimension keeps its size."""
    place, mapping = given.placements[0], given.params["broadcast_dimensions"]
    place = place.on(mapping[place.dim])
    if len(given.placements) > 1 or given.result[place.dim] != _size(given):
        return None
    shape = given.local(given.result, place)
    return Decision(given.placements, [place], {"shape": shape})


def _size(given: Given) -> int:
    """The size of the first operand's sharded dimension."""
    return given.shapes[0][given.placements[0].dim]


@rule("reshape")
def reshape(given: Given) -> Decision | None:
    """In row-major order the array is (before, parts, after); the parts must stay in one dim."""
    if len(given.placements) > 1 or given.params.get("dimensions") is not None:
        return None
    place, parts = given.placements[0], given.partition.parts
    before = math.prod(given.shapes[0][: place.dim]) * place.outer
    for dim, size in enumerate(given.result):
        ahead = math.prod(given.result[:dim])
        if ahead and before % ahead == 0 and size and size % (before // ahead * parts) == 0:
            place = sharded(dim, before // ahead)
            sizes = given.local(given.result, place)
            return Decision(given.placements, [place], {"new_sizes": sizes})
    return None


@rule("squeeze")
def squeeze(given: Given) -> Decision | None:
    """Removes dimensions of size 1."""
    place, gone = given.placements[0], given.params["dimensions"]
    return None if place.dim in gone else Decision([place], [_without(place, gone)])


def _without(place: Placement, gone: tuple[int, ...]) -> Placement:
    """Returns the placement after other dimensions are removed."""
    return place.on(place.dim - sum(d < place.dim for d in gone))


@rule("transpose")
def transpose(given: Given) -> Decision:
    """The placement moves with its dimension."""
    place = given.placements[0]
    return Decision([place], [place.on(given.params["permutation"].index(place.dim))])


@rule("split")
def split(given: Given) -> Decision | None:
    """Along the sharded dimension, into equal runs of blocks."""
    place, axis = given.placements[0], given.params["axis"]
    if place.dim != axis:
        return given.all(place)
    sizes = given.params["sizes"]
    if len(set(sizes)) > 1 or place.outer % len(sizes):
        return None
    result = sharded(axis, place.outer // len(sizes))
    local = tuple(size // given.partition.parts for size in sizes)
    return Decision([place], [result] * len(sizes), {"sizes": local})


@rule("unstack")
def unstack(given: Given) -> Decision | None:
    """Along another dimension, which is gone in the results."""
    place, axis = given.placements[0], given.params["axis"]
    if place.dim == axis:
        return None
    result = place.on(place.dim - (axis < place.dim))
    return Decision([place], [result] * len(given.eqn.outvars))


@rule("concatenate")
def concatenate(given: Given) -> Decision | None:
    """Along the sharded dimension, of equally sharded operands: their blocks follow each other."""
    place, axis = first_sharded(given.placements), given.params["dimension"]
    if place.dim != axis:
        return given.all(place) if agree(given.placements, place) else None
    alike = len(set(given.shapes)) == 1 and set(given.placements) == {place}
    blocks = place.outer * len(given.placements)
    return Decision(given.placements, [sharded(axis, blocks)]) if alike else None


@rule("stack")
def stack(given: Given) -> Decision | None:
    """A new dimension."""
    place, axis = first_sharded(given.placements), given.params["axis"]
    if not agree(given.placements, place):
        return None
    return given.all(place, place.on(place.dim + (axis <= place.dim)))


@rule("pad")
def pad(given: Given) -> Decision | None:
    """Along other dimensions."""
    place = given.placements[0]
    if not place.is_sharded or tuple(given.params["padding_config"][place.dim]) != (0, 0, 0):
        return None
    return Decision([place, REPLICATED], [place])


@rule("tile")
def tile(given: Given) -> Decision | None:
    """Along other dimensions."""
    place = given.placements[0]
    return given.all(place) if given.params["reps"][place.dim] == 1 else None


@rule(*_ALONG)
def along_one_dimension(given: Given) -> Decision | None:
    """Entries mix along one dimension, or several, which must be others."""
    place, params = first_sharded(given.placements), given.params
    rank = len(given.shapes[0])
    axes = next((params[n] for n in _AXES if n in params), rank - 1)
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    if place.dim in {a % rank for a in axes} or not agree(given.placements, place):
        return None
    return given.all(place)


@rule("reduce_sum", "reduce_prod", "reduce_xor", "argmax", "argmin", "reduce_max", "reduce_min")
@rule("reduce_or", "reduce_and", "psum", "pmax", "pmin")
def reduction(given: Given) -> Decision | None:
    """A sum over examples is a partial sum; their maximum is completed at once.

    `jax.vmap` turns a `psum` over its axis name into one over positions. Names are those of model
    axes, in a `shard_map` over them.
    """
    place, name = given.placements[0], given.eqn.primitive.name
    axes = tuple(axis for axis in given.params["axes"] if not isinstance(axis, str))
    aval = given.eqn.invars[0].aval
    named = len(axes) < len(given.params["axes"])
    if named and not axes:
        return Decision(given.placements, given.placements)
    if len(given.placements) > 1 or given.params.get("axis_index_groups"):
        return None
    if place.dim not in axes:
        return Decision([place], [_without(place, axes)])
    if name in ("reduce_sum", "psum"):
        return Decision([place], [PARTIAL])
    largest = {"reduce_max": True, "reduce_min": False, "pmax": True, "pmin": False}.get(name)
    if aval.dtype == jnp.bool_:
        largest = {"reduce_or": True, "reduce_and": False}.get(name, largest)
    if named or largest is None or jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return None
    if given.partition.parts == 1:  # nothing to compare with
        return None

    def run(values: list[Any]) -> list[Any]:
        evaluator = given.evaluator
        evaluator.record("extreme", given.eqn.outvars[0].aval, given.eqn)
        extreme = extreme_of_examples if evaluator.is_last else extreme_for_next
        return [extreme(values[0], axes, largest, evaluator.axes)]

    return Decision([place], [REPLICATED], run=run, largest=largest)
