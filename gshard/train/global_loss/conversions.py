"""Converts values between placements, and records what that communicates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gshard._util.arrays import is_key
from gshard._util.jaxpr import bind, in_scope, user_line
from gshard._util.named_calls import name_of
from gshard.train.comm.collectives import group_index
from gshard.train.comm.examples import (
    exchange_examples,
    gather_examples,
    scatter_partial,
    sum_partial,
)
from gshard.train.global_loss.draws import can_draw_part, iota_part, random_bits_part
from gshard.train.global_loss.messages import check_limit, one_batch_error, warn_of_kept
from gshard.train.global_loss.own_collectives import sum_error
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Partition, Placement
from gshard.train.global_loss.shape_rules import acts_by_entry
from gshard.train.global_loss.transfers import Transfer, needed_by
from gshard.train.global_loss.value import Value


class NeedsSum(Exception):  # not an error: it ends the evaluation of a loss
    """A sum over all micro-batches is not known.

    `partial` is this micro-batch's part of it, and `place` is what needs it.
    """

    def __init__(self, partial: jax.Array, place: str):
        super().__init__()
        self.partial, self.place = partial, place


class Conversions:
    """Values of the global batch in the placements that are asked for, inside a `shard_map`.

    Args:
      axes: the data axes.
      devices: along them.
      micro_batches: in which each device processes its examples.
      micro_batch: the number of this one.

    Attributes:
      partition: the parts of the batch, and this one.
      transfers: what was communicated.
      known: sums over all parts that were computed before, for several micro-batches.
      limit: bytes that one operation may all-gather; None for any number.
      of_examples: whether the parts are of the examples, and not of their sequences.
      batches: how many devices share the examples of the traced values.
      exchanges: whether an all-to-all may change which dimension is sharded: where parameters are
        kept on the axis.
      other_axes: the axes that share the examples of the traced values.
      platform: of the devices, as in `Group`.
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
        self.of_examples, self.batches, self.exchanges = of_examples, 1, False
        self.other_axes: tuple[str, ...] = ()
        self.platform = ""
        index = group_index(self.axes) * micro_batches + micro_batch
        self.partition = Partition(devices * micro_batches, index, zigzag)
        self.transfers, self.known = list[Transfer](), list[jax.Array]()
        self.limit: int | None = None
        self._times, self._at_least, self.bodies, self._line = 1, False, 0, ""

    @property
    def is_last(self) -> bool:
        """Whether no other evaluation follows this one, over other axes."""
        return self.of_examples and not self.exchanges

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
        if placement.is_sharded and self.exchanges and contiguous and not is_key(value.aval):
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
            results = bind(eqn, arrays)
        for x, array in zip(value.made_together or [value], results, strict=True):
            x.array = array

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
        """Returns a sum over all micro-batches if it is known; else it raises `NeedsSum`."""
        if value.placement != PARTIAL or value.depends or self.bodies:
            raise one_batch_error(self, eqn)
        if self.known:
            return self.known.pop(0)
        raise NeedsSum(value.array, self.place(eqn))

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
            results = bind(eqn, [self.convert(x, place, eqn) for x, place in pairs])
            for x, part in zip(value.made_together, results, strict=True):
                x.converted[placement] = part
            return value.converted[placement]
        return partition.part_of(jnp.asarray(self.convert(value, REPLICATED, eqn)), placement)

    def _entry_placement(self, x: Value, shape: Sequence[int], placement: Placement) -> Placement:
        own = x.aval.shape
        same = own and own[placement.dim] == shape[placement.dim]
        return placement if same else REPLICATED

    # ---- what is communicated

    def record(self, kind: str, aval: Any, eqn: Any) -> None:
        """Notes a collective that the loss needs."""
        name = "result" if eqn is None else name_of(eqn)
        if kind == "gather":
            check_limit(self, aval, eqn)
        found = Transfer.of(aval, kind, self._times, name, self._line_of(eqn))
        self.transfers.append(dataclasses.replace(found, at_least=self._at_least))

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
    def repeated(self, times: int | None) -> Iterator[None]:
        """Counts what is recorded inside as often as a loop runs; None: nobody knows how often."""
        before = self._times, self._at_least
        self._times, self._at_least = self._times * (times or 1), self._at_least or times is None
        try:
            yield
        finally:
            self._times, self._at_least = before
