"""Bounds of integers: which partial sums cannot overflow.

Partial sums of integers wrap around, and so do their sums over the devices: integers stay exact. As
floats they no longer wrap, so that only a sum that cannot overflow may be converted before it is
complete. Counts of booleans, small integers and positions are such sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

Bound = int | None


def bound_of(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    """Returns what no entry of an equation's result exceeds in absolute value; None if not known.

    `bounds` are those of the operands. Of a partial sum it bounds the sum of the absolute values of
    all parts.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or not _is_integer(eqn.outvars[0].aval.dtype):
        return None
    found = rule(eqn, bounds)
    return found if found is not None and found <= _limit(eqn.outvars[0].aval.dtype) else None


def bound_of_literal(variable: Any) -> Bound:
    """Returns the absolute value of an integer that is written in the loss."""
    if not isinstance(variable, Literal):
        return None
    aval: Any = variable.aval
    return abs(int(variable.val)) if not aval.shape and _is_integer(aval.dtype) else None


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def _limit(dtype: Any) -> int:
    return int(jnp.iinfo(dtype).max)


def _converted(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    """Small integers and booleans are bounded by their dtype: they are complete when they widen."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if old == jnp.bool_:
        return 1
    if not _is_integer(old):
        return None
    if jnp.issubdtype(old, jnp.signedinteger) and jnp.issubdtype(new, jnp.unsignedinteger):
        return None  # negative ones become large
    if bounds[0] is not None or old.itemsize > 2 or new.itemsize <= old.itemsize:
        return bounds[0]
    return _limit(old) + 1


def _kept(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return bounds[0]


def _largest(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return None if None in bounds else max(b for b in bounds if b is not None)


def _chosen(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return _largest(eqn, bounds[1:])


def _added(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return None if None in bounds else sum(b for b in bounds if b is not None)


def _below_zero(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    """Signed integers: unsigned ones wrap around below zero."""
    signed = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.signedinteger)
    return _added(eqn, bounds) if signed else None


def _multiplied(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return None if None in bounds else math.prod(b for b in bounds if b is not None)


def _times(number: int, bound: Bound) -> Bound:
    return None if bound is None else number * bound


def _reduced(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    shape = eqn.invars[0].aval.shape
    return _times(math.prod(shape[axis] for axis in eqn.params["axes"]), bounds[0])


def _along(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return _times(eqn.invars[0].aval.shape[eqn.params["axis"]], bounds[0])


def _contracted(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    (axes, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return _times(math.prod(shape[axis] for axis in axes), _multiplied(eqn, bounds))


def _scattered(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    """All updates may be added into one entry."""
    updates = math.prod(eqn.invars[2].aval.shape)
    return _added(eqn, [bounds[0], _times(updates, bounds[2])])


def _counted(eqn: Any, bounds: Sequence[Bound]) -> Bound:
    return eqn.params["shape"][eqn.params["dimension"]]


_RULES: dict[str, Callable[[Any, Sequence[Bound]], Bound]] = {
    **dict.fromkeys("broadcast_in_dim reshape squeeze transpose slice rev copy".split(), _kept),
    **dict.fromkeys("stop_gradient reduce_max reduce_min".split(), _kept),
    **dict.fromkeys("concatenate stack max min pad".split(), _largest),
    **dict.fromkeys(("neg", "sub"), _below_zero),
    "convert_element_type": _converted,
    "select_n": _chosen,
    "add": _added,
    "mul": _multiplied,
    "reduce_sum": _reduced,
    "cumsum": _along,
    "scatter-add": _scattered,
    "dot_general": _contracted,
    "iota": _counted,
}
