"""Evaluates equations that repeat so that JAX differentiates each kind of them once.

JAX caches the derivative and the transpose of what `jax.jit` calls, by its jaxpr, but derives those
of a bare equation every time, which takes twice as long as the call of a cached one. So equations
that occur several times, as in the layers of a model, are called through `jax.jit`, and each call
is one equation of the trace, as is each derivative. The compiler sees all equations as if there
were no calls. Where several in a row repeat, one call has them all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from gshard._util.jaxpr import INLINE_LATE, bind, inner_jaxprs
from gshard._util.jaxpr_dataflow import PRODUCTS

LEAST = 4  # occurrences of a kind, from which on a cached derivative takes less time


class RepeatedEquations:
    """The equations of a jaxpr that repeat, among those that are differentiated.

    Args:
      jaxpr: not closed.
      differentiated: the inputs with respect to which it is.
    """

    def __init__(self, jaxpr: Any, differentiated: Iterable[Any]):
        self._jaxpr = jaxpr
        self._kinds = {id(eqn): kind for eqn in jaxpr.eqns if (kind := _kind_of(eqn)) is not None}
        reached, kinds = set(differentiated), dict[int, Any]()
        for eqn in jaxpr.eqns:
            if any(isinstance(v, Var) and v in reached for v in eqn.invars):
                reached.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
                if id(eqn) in self._kinds:
                    kinds[id(eqn)] = self._kinds[id(eqn)]
        often = Counter(kinds.values())  # of this jaxpr alone: whatever was traced before it
        self._known = {i: _call(kind) for i, kind in kinds.items() if often[kind] >= LEAST}

    def bind(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Evaluates an equation like `bind`."""
        call = self._known.get(id(eqn))
        if call is None:
            return bind(eqn, values)
        pairs = zip(eqn.invars, values, strict=True)
        with eqn.ctx.manager:
            return call([x for v, x in pairs if not isinstance(v, Literal)])

    def runs(self, alone: Callable[[Any], bool]) -> Iterator[Run]:
        """Divides the equations into runs, in order; an equation that is `alone` is in no call.

        A run ends with a matrix product, so that layers of a model have equal runs, and has one
        named scope.
        """
        last: dict[Any, float] = {}
        for i, eqn in enumerate(self._jaxpr.eqns):
            last.update((v, i) for v in eqn.invars if isinstance(v, Var))
        last.update((v, math.inf) for v in self._jaxpr.outvars if isinstance(v, Var))
        found, end = list[tuple[Run, Any]](), 0
        for eqns in self._divided(alone):
            end += len(eqns)
            found.append(
                self._run(eqns, {v for e in eqns for v in e.outvars if last.get(v, 0) >= end})
            )
        often = Counter(key for _, key in found)
        for run, key in found:
            if key is not None and often[key] >= LEAST:
                run.call = _calls(key)
            yield run

    def _divided(self, alone: Callable[[Any], bool]) -> Iterator[list[Any]]:
        """Divides the equations; only equations in a list of several may be called together."""
        run: list[Any] = []
        for eqn in self._jaxpr.eqns:
            single = alone(eqn) or id(eqn) not in self._kinds  # `alone` sees every equation
            if run and (single or _place(eqn) != _place(run[-1])):
                yield run
                run = []
            run.append(eqn)
            if single or eqn.primitive.name in PRODUCTS:
                yield run
                run = []
        if run:
            yield run

    def _run(self, eqns: list[Any], used: set[Any]) -> tuple[Run, Any]:
        """Makes a run, of which `used` are results that are used after it, and its kind."""
        if len(eqns) == 1:
            return Run(eqns, [], []), None
        number, count = dict[Any, int](), itertools.count()
        kinds, inputs = [], []
        for eqn in eqns:
            given = [v for v in eqn.invars if isinstance(v, Var)]
            new = [v for v in dict.fromkeys(given) if v not in number]
            inputs += new
            number.update(zip(new, count, strict=False))
            ins = tuple(number[v] for v in given)
            number.update(zip(eqn.outvars, count, strict=False))
            kinds.append((self._kinds[id(eqn)], ins, len(new)))
        outputs = [v for eqn in eqns for v in eqn.outvars if v in used]
        return Run(eqns, inputs, outputs), (tuple(kinds), tuple(number[v] for v in outputs))


@dataclass
class Run:
    """Equations in a row, and where they repeat what computes all of them at once.

    Attributes:
      eqns: at least one.
      inputs: of the call.
      outputs: those results that are used after it.
      call: from a list of inputs to a list of outputs; None where nothing repeats.
    """

    eqns: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    call: Callable[[list[Any]], list[Any]] | None = None


def _place(eqn: Any) -> tuple[Any, ...]:
    return eqn.ctx, eqn.source_info.name_stack


@lru_cache(maxsize=1024)
def _calls(key: tuple[Any, ...]) -> Any:
    """Returns what computes a run of this kind."""
    kinds, outputs = key

    def repeated(values: list[Any]) -> list[Any]:
        rest, known = iter(values), list[Any]()
        for kind, ins, new in kinds:
            known += [next(rest) for _ in range(new)]
            known += _apply(kind, [known[i] for i in ins])
        return [known[i] for i in outputs]

    return jax.jit(repeated, inline=INLINE_LATE)


@lru_cache(maxsize=4096)
def _call(kind: tuple[Any, ...]) -> Any:
    """Returns what computes equations of this kind."""

    def repeated(values: list[Any]) -> list[Any]:
        return _apply(kind, values)

    return jax.jit(repeated, inline=INLINE_LATE)


def _apply(kind: tuple[Any, ...], values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation of this kind on its operands, without constants."""
    primitive, params, operands = kind
    rest = iter(values)
    given = [x.value if isinstance(x, _Constant) else next(rest) for x in operands]
    out = primitive.bind(*given, **{name: value for name, _, value, _ in params})
    return list(out) if primitive.multiple_results else [out]


@dataclass(frozen=True)
class _Constant:
    """A literal operand; its bits tell 0 and -0 apart, and a NaN is equal to itself."""

    aval: Any
    bits: bytes
    value: Any = field(compare=False)


def _kind_of(eqn: Any) -> tuple[Any, ...] | None:
    """What equations that compute the same have in common; None for one that is not cached."""
    if eqn.effects or any(inner.eqns for inner in inner_jaxprs(eqn)):
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
