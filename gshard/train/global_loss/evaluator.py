"""Evaluates a loss that was traced for the global batch, on the examples of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.extend.core import Literal

from gshard._util.arrays import is_key
from gshard._util.jaxpr import as_traced, bind, body_of, evaluate, in_scope
from gshard.train.global_loss import (  # noqa: F401  the imports register the rules
    attention_rules,
    bodies,
    derivatives,
    index_rules,
    partial_rules,
    product_rules,
    shape_rules,
)
from gshard.train.global_loss.conversions import Conversions
from gshard.train.global_loss.decide import decide, is_inlined
from gshard.train.global_loss.extremes import extreme_call
from gshard.train.global_loss.halo import with_padding
from gshard.train.global_loss.messages import one_batch_error
from gshard.train.global_loss.own_collectives import (
    is_own_collective,
    is_own_sum,
    sum_size,
)
from gshard.train.global_loss.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
)
from gshard.train.global_loss.positions import of_constant, of_literal, positions_of
from gshard.train.global_loss.registry import Decision
from gshard.train.global_loss.sequence_calls import warn_of_transformed
from gshard.train.global_loss.shape_rules import acts_by_entry
from gshard.train.global_loss.value import Value

_FROM_NOTHING = ("iota", "broadcast_in_dim", "random_bits")
# Integers may wrap, complex numbers have no order, and float8 may have no infinity.
_ORDERED = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
# Functions that only increase in an operand, or only decrease: `neg`, and the second of `sub`.
_IN_ORDER = frozenset(
    "add convert_element_type copy exp logistic max min name neg reshape sharding_constraint "
    "squeeze stop_gradient sub tanh".split()
)


class GlobalEvaluator(Conversions):
    """Evaluates jaxprs of the global batch, inside a `shard_map` over the data axes.

    Takes the arguments of `Conversions`, and adds these attributes.

    Attributes:
      gathers: how many equations were decided to need all examples of an operand.
      statistics: whether the backward pass of a `custom_vjp` may return a statistic of a
        micro-batch, of which the largest is taken (fp8).
      divides_first: whether to divide by the loss's weight before the gradient is taken.
      returned: of the results of the last body, whether they are statistics.
    """

    gathers: int = 0
    statistics: bool = False
    divides_first: bool = False
    returned: list[bool]
    _takes_statistics: bool = False

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr, which is not closed; its results are held as the rules say."""
        jaxpr = jaxpr if self.of_examples else with_padding(jaxpr)
        run = self._evaluate_equation if self.is_last else self._evaluate_with_its_line
        out = evaluate(jaxpr, consts, values, run)
        return [self._value(v, x) for v, x in zip(jaxpr.outvars, out, strict=True)]

    def arrays(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        placements: Sequence[Placement],
        arrays: Sequence[Any],
        results: Sequence[Placement],
        statistics: Sequence[bool] = (),
    ) -> list[Any]:
        """Evaluates a body, from arrays of these placements to arrays of those.

        `statistics` says of operands, and `self.returned` of results, whether they are statistics.
        """
        given = zip(jaxpr.invars, placements, arrays, strict=True)
        values = [Value(place, v.aval, x, depends=True) for v, place, x in given]
        for value, statistic in zip(values, statistics, strict=False):
            value.statistic = statistic
        self.bodies += 1
        try:
            out = self.evaluate(jaxpr, consts, values)
            self.returned = [x.statistic for x in out]
            return [self.convert(x, place) for x, place in zip(out, results, strict=True)]
        finally:
            self.bodies -= 1

    def _value(self, variable: Any, x: Any) -> Value:
        if isinstance(x, Value):
            return x
        known = of_literal(variable) if isinstance(variable, Literal) else of_constant(x)
        return Value(REPLICATED, variable.aval, x, positions=known)

    def _evaluate_with_its_line(self, eqn: Any, operands: list[Any]) -> list[Value]:
        """The evaluation over other axes, of what this one traces, names the user's line too."""
        with as_traced(eqn):
            return self._evaluate_equation(eqn, operands)

    def _evaluate_equation(self, eqn: Any, operands: list[Any]) -> list[Value]:
        values = [self._value(v, x) for v, x in zip(eqn.invars, operands, strict=True)]
        name = eqn.primitive.name
        found = extreme_call(eqn, values[0].placement) if values else None
        if found is not None and self._puts_off_extremes:
            return [self._extreme(eqn, values, found.run(values[0].array), found.largest)]
        if found is not None and not self.is_last:
            self.record("extreme", eqn.outvars[0].aval, eqn)
            own = found.over(self.axes)(values[0].array)
            return [Value(REPLICATED, eqn.outvars[0].aval, own, depends=values[0].depends)]
        if (found := _extreme_of(eqn, values)) is not None:
            return [found]
        if is_inlined(self, eqn, [x.placement for x in values]):
            warn_of_transformed(self, eqn, [x.placement for x in values])
            body, consts = body_of(eqn)
            with self._called_by(eqn):
                return self.evaluate(body, consts, values)
        if name == "convert_element_type" and (own := values[0].summed) is not None:
            (converted,) = self._evaluate_equation(eqn, [own])
            value = Value(REPLICATED, converted.aval, source=values[0].source, summed=converted)
            return [value]
        if name == "div":
            values = _of_one_device(values)
            if len(values) == 1:
                return values
        known = [x.positions for x in values]
        positions = positions_of(eqn, known) if eqn.outvars else None
        depends = name != "stop_gradient" and any(x.depends for x in values)
        places, own = [x.placement for x in values], [x.depends for x in values]
        decision = decide(self, eqn, places, known, own)
        if name in ("pmax", "pmin") and is_own_collective(eqn, self.axes):
            return values
        if is_own_sum(eqn, self.axes):
            results = zip(eqn.outvars, values, strict=True)
            source = (eqn, values)
            return [Value(REPLICATED, v.aval, source=source, summed=x) for v, x in results]
        is_statistic = any(x.statistic for x in values)
        if _is_from_nothing(eqn, values, decision):
            put_off = [
                Value(REPLICATED, v.aval, None, (eqn, values), depends, positions)
                for v in eqn.outvars
            ]
            for x in put_off:
                x.statistic, x.made_together = is_statistic, put_off
            return put_off
        if decision.largest is not None and self._puts_off_extremes:
            (own,) = bind(eqn, [self.convert(values[0], decision.operands[0], eqn)])
            return [self._extreme(eqn, values, own, decision.largest)]
        if _is_quotient(eqn, values):
            return [self._quotient(eqn, values, depends)]
        placed = list(zip(values, decision.operands, strict=True))
        for x, place in placed:  # made here, so that their scopes are not inside that of this one
            if x.array is None and place == REPLICATED:
                self.convert(x, place, eqn)
        with in_scope(eqn, "loss"):
            arrays = [self.convert(x, place, eqn) for x, place in placed]
            if decision.run is not None:
                with self._called_by(eqn), self._named(eqn):
                    results = decision.run(arrays)
            else:
                results = bind(eqn, arrays, **decision.params)
        of_micro_batch = decision.largest is not None and self.micro_batches > 1
        statistic, out = of_micro_batch or is_statistic, []
        for v, x, place in zip(eqn.outvars, results, decision.results, strict=True):
            self._check(eqn, v.aval, x, place)
            if statistic and place != REPLICATED:  # a batch maximum that is used for something else
                raise one_batch_error(self, eqn)
            varies = depends and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            out.append(Value(place, v.aval, x, depends=varies, positions=positions))
            out[-1].statistic = statistic
        return out

    def _check(self, eqn: Any, aval: Any, x: Any, placement: Placement) -> None:
        wanted = self.partition.local_shape(aval.shape, placement)
        if np.shape(x) != wanted:
            raise AssertionError(
                f"{self.place(eqn)}: the rule says {placement} of "
                f"{aval.shape}, which is {wanted}, and the result has {jnp.shape(x)}."
            )

    @property
    def _puts_off_extremes(self) -> bool:
        return self.micro_batches > 1 and not self._takes_statistics

    def _extreme(self, eqn: Any, values: list[Value], own: Any, largest: bool) -> Value:
        """A maximum over all micro-batches, which is known after the last; `own` is of this one."""
        aval = eqn.outvars[0].aval
        return Value(REPLICATED, aval, source=(eqn, values), depends=True, extreme=(own, largest))

    def _quotient(self, eqn: Any, values: list[Value], depends: bool) -> Value:
        """A scalar sum over examples divided by what is not differentiated, not divided yet."""
        numerator, denominator = values
        value = Value(PARTIAL, eqn.outvars[0].aval, depends=depends)
        value.quotient = (numerator, denominator)
        value.source = (eqn, values)
        return value

    @contextmanager
    def indexed(self, index: jax.Array, eqn: Any, statistics: bool = False) -> Iterator[None]:
        """Uses this index of the part, for a function that `eqn` calls.

        It may not close over the other index. `statistics`: whether it may compute statistics.
        """
        before = self.partition, self._takes_statistics
        self.partition = replace(self.partition, index=index)
        self._takes_statistics |= statistics and self.statistics
        try:
            with self._called_by(eqn):
                yield
        finally:
            self.partition, self._takes_statistics = before


def _extreme_of(eqn: Any, values: Sequence[Value]) -> Value | None:
    """What an equation makes of a maximum that is not known yet, if it keeps the order of numbers.

    The maximum of what it makes of each part is what it makes of the maximum.
    """
    at = [i for i, x in enumerate(values) if x.extreme is not None]
    numbers = [_number(x.array) for x in values if x.extreme is None]
    if len(at) != 1 or eqn.primitive.name not in _IN_ORDER:
        return None
    if not all(x is not None and np.isfinite(x) for x in numbers):
        return None
    old, aval = values[at[0]], eqn.outvars[0].aval
    if aval.dtype not in _ORDERED:
        return None
    own, largest = old.extreme or (None, True)
    (new,) = bind(eqn, [own if x.extreme is not None else x.array for x in values])
    turned = eqn.primitive.name == "neg" or (eqn.primitive.name == "sub" and at[0] == 1)
    return replace(old, aval=aval, extreme=(new, largest != turned), converted={})


def _number(x: Any) -> Any:
    """The number that a loss closes over, or has in its code; None for anything else."""
    if x is None or isinstance(x, jax_core.Tracer) or np.ndim(x) or is_key(x):
        return None
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(x)[()]


def _is_from_nothing(eqn: Any, values: Sequence[Value], decision: Decision) -> bool:
    """Whether an equation is put off until a part of its result is needed."""
    if decision.run is not None or {*decision.results} != {REPLICATED}:
        return False
    name = eqn.primitive.name
    if any(x.placement != REPLICATED for x in values):
        return False
    if acts_by_entry(eqn):
        return any(x.array is None for x in values)
    return name in _FROM_NOTHING and len(values) <= 1


def _of_one_device(values: list[Value]) -> list[Value]:
    """Undoes the loss's own sums over the devices in a mean, or in a quotient of two sums.

    Returns the operands of the division, or its result alone.
    """
    one, other = values
    if one.summed is None:
        return values
    if other.summed is not None:
        return [one.summed, other.summed]
    number = _number(other.array)
    is_count = number is not None and number == sum_size(one.source[0])
    return [one.summed] if is_count else values


def _is_quotient(eqn: Any, values: Sequence[Value]) -> bool:
    return (
        eqn.primitive.name == "div"
        and all(x.placement == PARTIAL for x in values)
        and eqn.outvars[0].aval.shape == ()
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        and not values[1].depends
    )
