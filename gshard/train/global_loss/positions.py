"""Knows which integers are positions, so that `x[jnp.arange(examples), y]` needs no collective.

It also carries their bounds (`bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from gshard.train.global_loss.bounds import Bound, bound_of, bound_of_literal

_KNOWN_ALONE = ("iota", "convert_element_type")  # whatever is known of the operands


@dataclass(frozen=True)
class Positions:
    """What is known of an integer array, or of a comparison of one.

    Attributes:
      dim: every entry is its own index along this dimension; None: not known.
      columns: pairs `(column, dim)`: these columns of the last dimension are indices along `dim`.
      never: a boolean that is false everywhere: whether an index is negative.
      bound: what no entry exceeds in absolute value, nor do the parts of a partial sum together.
    """

    dim: int | None = None
    columns: tuple[tuple[int, int], ...] = ()
    never: bool = False
    bound: Bound = None


def positions_of(eqn: Any, known: Sequence[Positions | None]) -> Positions | None:
    """Returns what is known of the first result of an equation."""
    if eqn.primitive.name not in _KNOWN_ALONE and not any(known):
        return None
    found, bound = _indices(eqn, known), bound_of(eqn, [x and x.bound for x in known])
    if found is None and bound is None:
        return None
    return replace(found or Positions(), bound=bound)


def of_literal(variable: Any) -> Positions | None:
    """Returns what is known of a number that is written in the loss."""
    bound = bound_of_literal(variable)
    return None if bound is None else Positions(bound=bound)


def _indices(eqn: Any, known: Sequence[Positions | None]) -> Positions | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        # a narrower integer or a float may not hold every index
        return Positions(params["dimension"]) if _is_wide(params["dtype"]) else None
    if not any(known):
        return None
    first, out = known[0], eqn.outvars[0].aval
    if name == "concatenate":
        return _columns(eqn, known)
    if first is None:
        return None
    if name == "select_n":
        return known[1] if first.never else None
    if first.dim is None:
        return None
    if name in ("convert_element_type", "copy"):
        return first if _is_wide(out.dtype) else None
    if name == "broadcast_in_dim":
        dim = params["broadcast_dimensions"][first.dim]
        same = out.shape[dim] == eqn.invars[0].aval.shape[first.dim]
        return Positions(dim) if same else None
    if name == "lt":
        bound = eqn.invars[1]
        zero = isinstance(bound, Literal) and jnp.ndim(bound.val) == 0 and bound.val == 0
        return Positions(never=True) if zero else None
    return None


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize >= 4


def _columns(eqn: Any, known: Sequence[Positions | None]) -> Positions | None:
    """Columns of size 1 side by side, as the indices of a gather are."""
    last = len(eqn.outvars[0].aval.shape) - 1
    if eqn.params["dimension"] != last or any(v.aval.shape[-1] != 1 for v in eqn.invars):
        return None
    found = [
        (column, x.dim)
        for column, x in enumerate(known)
        if x is not None and x.dim is not None and x.dim != last
    ]
    return Positions(columns=tuple(found)) if found else None
