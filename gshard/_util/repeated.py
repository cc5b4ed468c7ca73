"""Evaluates equations that repeat so that JAX differentiates each kind of them once.

JAX caches the derivative and the transpose of what `jax.jit` calls, by its jaxpr, but derives those
of a bare equation every time, which takes twice as long as the call of a cached one. So equations
that occur several times, as in the layers of a model, are called through `jax.jit`, which adds what
it calls to the trace as if it were not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from gshard._util.jaxpr import bind, with_inner

LEAST = 4  # occurrences of a kind, from which on a cached derivative takes less time
_KINDS: Any = getattr(jax, "Inline", None)  # None up to JAX 0.11, where a boolean means the same
_INLINE: Any = True if _KINDS is None else _KINDS.JAX_EARLY


class RepeatedEquations:
    """The equations of a jaxpr that repeat, among those that are differentiated.

    Args:
      jaxpr: not closed.
      differentiated: the inputs with respect to which it is.
    """

    def __init__(self, jaxpr: Any, differentiated: Iterable[Any]):
        reached, kinds = set(differentiated), dict[int, Any]()
        for eqn in jaxpr.eqns:
            if any(isinstance(v, Var) and v in reached for v in eqn.invars):
                reached.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
                if (kind := _kind_of(eqn)) is not None:
                    kinds[id(eqn)] = kind
        known = {kind: _equation(kind) for kind in kinds.values()}
        for kind, count in Counter(kinds.values()).items():
            known[kind].count += count
        self._known = {i: known[kind] for i, kind in kinds.items() if known[kind].count >= LEAST}

    def bind(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Evaluates an equation like `bind`."""
        known = self._known.get(id(eqn))
        if known is None:
            return bind(eqn, values)
        pairs = zip(eqn.invars, values, strict=True)
        with eqn.ctx.manager:
            return known.call([x for v, x in pairs if not isinstance(v, Literal)])


class _Equation:
    """All equations of a kind, and how many of them were seen."""

    def __init__(self, kind: tuple[Any, ...]):
        self.count = 0
        primitive, params, operands = kind
        params = {name: value for name, _, value, _ in params}

        def call(values: list[Any]) -> list[Any]:
            rest = iter(values)
            given = [x.value if isinstance(x, _Constant) else next(rest) for x in operands]
            out = primitive.bind(*given, **params)
            return list(out) if primitive.multiple_results else [out]

        self.call = jax.jit(call, inline=_INLINE)


@dataclass(frozen=True)
class _Constant:
    """A literal operand; its bits tell 0 and -0 apart, and a NaN is equal to itself."""

    aval: Any
    bits: bytes
    value: Any = field(compare=False)


@lru_cache(maxsize=4096)
def _equation(kind: tuple[Any, ...]) -> _Equation:
    return _Equation(kind)


def _kind_of(eqn: Any) -> tuple[Any, ...] | None:
    """What equations that compute the same have in common; None for one that is not cached."""
    if eqn.effects or sum(1 for _ in with_inner(eqn)) > 1:
        return None
    params = tuple((k, type(v), v, _exact(v)) for k, v in eqn.params.items())
    operands = tuple(_operand(v) for v in eqn.invars)
    try:
        hash(params)
    except TypeError:
        return None
    return eqn.primitive, params, operands


def _exact(value: Any) -> str:
    """Tells numbers apart that are equal, such as 0 and -0, or 1 and True in a tuple."""
    return repr(value) if isinstance(value, (float, complex, np.generic, tuple)) else ""


def _operand(v: Any) -> Any:
    if isinstance(v, Literal):
        return _Constant(v.aval, np.asarray(v.val).tobytes(), v.val)
    return v.aval
