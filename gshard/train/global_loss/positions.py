"""Knows which integers are positions, so that `x[jnp.arange(examples), y]` needs no collective.

It also carries their bounds (`bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from gshard.train.global_loss.bounds import Bound, bound_of, bound_of_literal

_KNOWN_ALONE = ("iota", "convert_element_type")  # whatever is known of the operands
_SAME = ("convert_element_type", "copy", "name", "sharding_constraint", "stop_gradient")
_MOST = 2**20  # entries of an array of the loss's own that are looked at


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


def of_constant(x: Any) -> Positions | None:
    """Returns what is known of an array that the loss closes over, such as `np.arange(n)`."""
    if isinstance(x, Tracer) or not hasattr(x, "dtype") or np.size(x) > _MOST:
        return None
    if not getattr(x, "is_fully_addressable", True):
        return None
    if x.dtype != jnp.bool_ and not _is_wide(x.dtype):
        return None
    with jax.transfer_guard_device_to_host("allow"):
        x = np.asarray(x)
    if x.dtype == jnp.bool_:  # JAX has compared such an array with 0
        return None if x.any() else Positions(never=True)
    for dim, n in enumerate(x.shape):
        along = np.expand_dims(np.arange(n), tuple(d for d in range(np.ndim(x)) if d != dim))
        if n > 1 and np.array_equal(x, np.broadcast_to(along, np.shape(x))):
            return Positions(dim)
    return None


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
    if (same := _same_as(eqn)) is not None:
        first = known[same]
        return first if first is not None and _is_wide(out.dtype) else None
    if first is None:
        return None
    if name == "select_n":
        return known[1] if first.never else None
    if first.dim is None:
        return None
    if name == "reshape" and params["dimensions"] is not None:  # it transposes first
        return None
    if name in ("reshape", "squeeze"):
        return _without_ones(eqn.invars[0].aval.shape, first.dim, out.shape)
    if name == "broadcast_in_dim":
        dim = params["broadcast_dimensions"][first.dim]
        same = out.shape[dim] == eqn.invars[0].aval.shape[first.dim]
        return Positions(dim) if same else None
    if name == "lt":
        bound = eqn.invars[1]
        zero = isinstance(bound, Literal) and jnp.ndim(bound.val) == 0 and bound.val == 0
        return Positions(never=True) if zero else None
    return None


def _same_as(eqn: Any) -> int | None:
    """The operand that the result is equal to, as in `x + 0` and `1 * x` of `jnp.ogrid`."""
    name = eqn.primitive.name
    if name in _SAME:
        return 0
    neutral = {"add": 0, "sub": 0, "mul": 1}.get(name)
    if neutral is None:
        return None
    numbers = [isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val for v in eqn.invars]
    if numbers[1] is not False and numbers[1] == neutral:
        return 0
    return 1 if name != "sub" and numbers[0] is not False and numbers[0] == neutral else None


def _without_ones(old: Sequence[int], dim: int, new: Sequence[int]) -> Positions | None:
    """Of a reshape that adds or removes dimensions of size 1 alone."""
    large = [[d for d, n in enumerate(shape) if n > 1] for shape in (old, new)]
    if dim not in large[0] or [old[d] for d in large[0]] != [new[d] for d in large[1]]:
        return None
    return Positions(large[1][large[0].index(dim)])


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
