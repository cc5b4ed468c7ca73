"""Evaluates a loss that was traced for the global batch, on the examples of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.ad_checkpoint import checkpoint_name

from gshard._util.arrays import is_key
from gshard._util.jaxpr import as_traced, bind, body_of, evaluate, in_scope, user_line
from gshard._util.named_calls import name_of
from gshard.train.comm.collectives import group_index
from gshard.train.comm.examples import (
    exchange_examples,
    gather_examples,
    scatter_partial,
    sum_partial,
)
from gshard.train.global_loss import (  # noqa: F401  the imports register the rules
    attention_rules,
    bodies,
    derivatives,
    index_rules,
    partial_rules,
    product_rules,
    shape_rules,
)
from gshard.train.global_loss.decide import decide, is_inlined
from gshard.train.global_loss.draws import can_draw_part, iota_part, random_bits_part
from gshard.train.global_loss.extremes import extreme_call
from gshard.train.global_loss.halo import with_padding
from gshard.train.global_loss.messages import check_limit, one_batch_error, warn_of_kept
from gshard.train.global_loss.own_collectives import (
    is_own_collective,
    is_own_sum,
    sum_error,
    sum_size,
)
from gshard.train.global_loss.placement import (
    PARTIAL,
    REPLICATED,
    Partition,
    Placement,
)
from gshard.train.global_loss.positions import of_literal, positions_of
from gshard.train.global_loss.registry import Decision
from gshard.train.global_loss.sequence_calls import warn_of_transformed
from gshard.train.global_loss.shape_rules import acts_by_entry
from gshard.train.global_loss.transfers import Transfer, needed_by
from gshard.train.global_loss.value import Value

_FROM_NOTHING = ("iota", "broadcast_in_dim", "random_bits")


class NeedsSum(Exception):  # not an error: it ends a trace
    """The loss needs a sum over all micro-batches that is not known yet; this is its part."""

    def __init__(self, partial: jax.Array):
        super().__init__()
        self.partial = partial


class GlobalEvaluator:
    """Evaluates jaxprs of the global batch, inside a `shard_map` over the data axes.

    Args:
      axes: the data axes.
      devices: along them.
      micro_batches: in which each device processes its examples.
      micro_batch: the number of this one.

    Attributes:
      partition: the parts of the batch, and this one.
      transfers: what was communicated.
      gathers: how many equations were decided to need all examples of an operand.
      known: sums over all parts that were computed before, for several micro-batches.
      limit: bytes that one operation may all-gather; None for any number.
      statistics: whether the backward pass of a `custom_vjp` may return a statistic of a
        micro-batch, of which the largest is taken (fp8).
      own_gradients: whether the loss has backward passes that the user wrote.
      of_examples: whether the parts are of the examples, and not of their sequences.
      batches: how many devices share the examples of the traced values.
      exchanges: whether an all-to-all may change which dimension is sharded: where parameters are
        kept on the axis.
      other_axes: the axes that share the examples of the traced values.
      bodies: how many bodies, of loops, branches and `jax.checkpoint`, are being evaluated.
    """

    def __init__(
        self,
        axes: Sequence[str],
        devices: int,
        micro_batches: int = 1,
        micro_batch: Any = 0,
        of_examples: bool = True,
        zigzag: bool = False,
    ):
        self.axes, self.micro_batches = tuple(axes), micro_batches
        self.of_examples, self.batches = of_examples, 1
        self.exchanges = self.own_gradients = False
        self.other_axes: tuple[str, ...] = ()
        index = group_index(self.axes) * micro_batches + micro_batch
        self.partition = Partition(devices * micro_batches, index, zigzag)
        self.transfers, self.gathers = list[Transfer](), 0
        self.known = list[jax.Array]()
        self.limit: int | None = None
        self.statistics = self._takes_statistics = False
        self.returned: list[bool] = []
        self._times, self.bodies, self._line = 1, 0, ""

    @property
    def is_last(self) -> bool:
        """Whether no other evaluation follows this one, over other axes."""
        return self.of_examples and not self.exchanges

    # ---- evaluation

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
        return Value(REPLICATED, variable.aval, x, positions=of_literal(variable))

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
        if is_inlined(self, eqn, [x.placement for x in values]):
            warn_of_transformed(self, eqn, [x.placement for x in values])
            body, consts = body_of(eqn)
            with self._called_by(eqn):
                return self.evaluate(body, consts, values)
        if name == "div":
            values = _of_one_device(values)
            if len(values) == 1:
                return values
        known = [x.positions for x in values]
        positions = positions_of(eqn, known) if eqn.outvars else None
        depends = name != "stop_gradient" and any(x.depends for x in values)
        decision = decide(self, eqn, [x.placement for x in values], known)
        if name in ("pmax", "pmin") and is_own_collective(eqn, self.axes):
            return values
        if is_own_sum(eqn, self.axes):
            results = zip(eqn.outvars, values, strict=True)
            source = (eqn, values)
            return [Value(REPLICATED, v.aval, source=source, summed=x) for v, x in results]
        is_statistic = any(x.statistic for x in values)
        if _is_from_nothing(eqn, values, decision):
            aval, source = eqn.outvars[0].aval, (eqn, values)
            put_off = Value(REPLICATED, aval, None, source, depends, positions)
            put_off.statistic = is_statistic
            return [put_off]
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

    # ---- conversions

    def convert(self, value: Value, placement: Placement, eqn: Any = None) -> Any:
        """Returns the array of a value in a placement; `eqn` is the equation that needs it."""
        if placement not in value.converted:
            value.converted[placement] = self._convert(value, placement, eqn)
        return value.converted[placement]

    def _convert(self, value: Value, placement: Placement, eqn: Any) -> Any:
        if 0 in value.aval.shape and not is_key(value.aval):
            return jnp.zeros(
                self.partition.local_shape(value.aval.shape, placement), value.aval.dtype
            )
        alone = self.partition.parts == 1  # every placement is the same array
        from_nothing = value.array is None and value.placement == REPLICATED and not alone
        if from_nothing and placement.is_sharded:
            return self._part_from_nothing(value, placement)
        if value.array is None:
            self._make(value)
        array: Any = value.array
        if value.placement == placement or alone:
            return array
        if value.placement == REPLICATED:
            if placement == PARTIAL and value.statistic:
                return array
            if placement == PARTIAL:
                first = self.partition.index == 0
                return jnp.where(first, array, jnp.zeros_like(array))
            return self.partition.part_of(jnp.asarray(array), placement)
        if placement == REPLICATED:
            return self._complete(value, eqn)
        contiguous = value.placement.outer == placement.outer == 1
        if self.exchanges and contiguous and not is_key(value.aval):
            return self._moved(value, placement, eqn)
        full = Value(REPLICATED, value.aval, self.convert(value, REPLICATED, eqn))
        return self.convert(full, placement, eqn)

    def _moved(self, value: Value, placement: Placement, eqn: Any) -> Any:
        """Shards another dimension, or makes a sum of which each device has a part."""
        x, old = jnp.asarray(value.array), value.placement
        self.record("exchange" if old.is_sharded else "scatter", value.aval, eqn)
        with self._named(eqn):
            if not old.is_sharded:
                return scatter_partial(x, placement.dim, self.axes)
            moved = exchange_examples(x, old.dim, placement.dim, self.axes)
            return checkpoint_name(moved, "expert_exchange")

    def _make(self, value: Value) -> None:
        """Makes a value that was put off."""
        eqn, values = value.source
        if value.extreme is not None:
            raise one_batch_error(self, eqn)
        if value.summed is not None:
            raise sum_error(self.place(eqn))
        if value.quotient is not None:
            sums = [self.convert(value.quotient[0], PARTIAL, eqn)]
            arrays = [*sums, self.convert(value.quotient[1], REPLICATED, eqn)]
        else:
            arrays = [self.convert(x, REPLICATED, eqn) for x in values]
        with in_scope(eqn, "loss"):
            (value.array,) = bind(eqn, arrays)

    def _complete(self, value: Value, eqn: Any) -> Any:
        """Makes a value replicated: sums it over the devices, or all-gathers it."""
        kind = "sum" if value.placement == PARTIAL else "gather"
        if value.placement.kept:
            warn_of_kept(self, eqn)
        if self.micro_batches > 1:
            return self._sum_of_micro_batches(value, eqn)
        self.record(kind, value.aval, eqn)
        with self._named(eqn):
            if kind == "sum":
                return sum_partial(jnp.asarray(value.array), self.axes)
            x, place = value.array, value.placement
            how = (place.dim, place.outer, self.axes, self.partition.zigzag)
            if is_key(x):
                data = gather_examples(jax.random.key_data(x), *how)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            return gather_examples(x, *how)

    def _sum_of_micro_batches(self, value: Value, eqn: Any) -> Any:
        """Returns a sum over all micro-batches, which a pass before this one has computed."""
        if value.placement != PARTIAL or value.depends or self.bodies:
            raise one_batch_error(self, eqn)
        if self.known:
            return self.known.pop(0)
        raise NeedsSum(value.array)

    def _part_from_nothing(self, value: Value, placement: Placement) -> Any:
        """Makes this device's part of a value that depends on no example."""
        eqn, values = value.source
        name, shape, partition = eqn.primitive.name, value.aval.shape, self.partition
        if name == "iota":
            return iota_part(eqn, partition, placement)
        if name == "broadcast_in_dim":
            (operand,), mapping = values, eqn.params["broadcast_dimensions"]
            wanted = REPLICATED
            if placement.dim in mapping:
                dim = mapping.index(placement.dim)
                if operand.aval.shape[dim] == shape[placement.dim]:
                    wanted = placement.on(dim)
            local = partition.local_shape(shape, placement)
            return bind(eqn, [self.convert(operand, wanted, eqn)], shape=local)[0]
        if name == "random_bits":
            key = self.convert(values[0], REPLICATED, eqn)
            if can_draw_part(eqn, key):
                return random_bits_part(eqn, key, partition, placement)
        elif acts_by_entry(eqn):
            operands = [self._entry_placement(x, shape, placement) for x in values]
            pairs = zip(values, operands, strict=True)
            return bind(eqn, [self.convert(x, place, eqn) for x, place in pairs])[0]
        return partition.part_of(jnp.asarray(self.convert(value, REPLICATED, eqn)), placement)

    def _entry_placement(self, x: Value, shape: Sequence[int], placement: Placement) -> Placement:
        own = x.aval.shape
        same = own and own[placement.dim] == shape[placement.dim]
        return placement if same else REPLICATED

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

    # ---- what is communicated

    def record(self, kind: str, aval: Any, eqn: Any) -> None:
        """Notes a collective that the loss needs."""
        name = "result" if eqn is None else name_of(eqn)
        if kind == "gather":
            check_limit(self, aval, eqn)
        self.transfers.append(Transfer.of(aval, kind, self._times, name, self._line_of(eqn)))

    def place(self, eqn: Any) -> str:
        """Names an equation and the user's line; None is the end of the loss."""
        if eqn is None:
            return "the result of the loss"
        line = self._line_of(eqn)
        return f"{name_of(eqn)} at {line}" if line else name_of(eqn)

    def _line_of(self, eqn: Any) -> str:
        """The user's line, of the caller where the equation itself was traced for another."""
        return (eqn is not None and user_line(eqn)) or self._line

    def _named(self, eqn: Any) -> AbstractContextManager[Any]:
        """Names the equation to those who read what a loss communicates over a sequence axis."""
        if self.is_last:
            return nullcontext()
        return needed_by("result" if eqn is None else name_of(eqn), self._line_of(eqn))

    @contextmanager
    def _called_by(self, eqn: Any) -> Iterator[None]:
        before, self._line = self._line, self._line_of(eqn)
        try:
            yield
        finally:
            self._line = before

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Counts what is recorded inside as often as a loop runs."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before


def _is_from_nothing(eqn: Any, values: Sequence[Value], decision: Decision) -> bool:
    """Whether an equation is put off until a part of its result is needed."""
    if decision.run is not None or list(decision.results) != [REPLICATED]:
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
    number = other.array
    if number is None or isinstance(number, jax_core.Tracer) or np.ndim(number):
        return values
    return [one.summed] if number == sum_size(one.source[0]) else values


def _is_quotient(eqn: Any, values: Sequence[Value]) -> bool:
    return (
        eqn.primitive.name == "div"
        and all(x.placement == PARTIAL for x in values)
        and eqn.outvars[0].aval.shape == ()
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        and not values[1].depends
    )
