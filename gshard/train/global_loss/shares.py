"""A loss of the global batch, as the share that one device contributes to it.

The shares of all devices and micro-batches add up to the loss. A quotient of sums, such as a mean
over valid tokens, stays apart: its numerators and its denominators add up, and are divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arrays import at_least_float32, wide_dtype
from gshard._util.errors import GShardError, warn
from gshard._util.jaxpr import CUSTOM_VJP, abstract, abstract_like, dtypes, primitives
from gshard._util.jaxpr_dataflow import inputs_used
from gshard.sharding.group import Group
from gshard.sharding.topology import SEQUENCE
from gshard.train.comm.examples import gather_examples, sum_partial
from gshard.train.fsdp.trace_loss import trace_loss
from gshard.train.global_loss.conversions import NeedsSum
from gshard.train.global_loss.evaluator import GlobalEvaluator
from gshard.train.global_loss.messages import per_example_error
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement, sharded
from gshard.train.global_loss.transfers import Transfer
from gshard.train.global_loss.value import Value
from gshard.train.loss import SAME, Reduced, Weighted, has_reduction


@dataclass
class GlobalBatch:
    """Evaluates functions of the global batch on the examples of one device.

    Attributes:
      group: the devices of the data axes.
      micro_batches: in which each device processes its examples of this batch.
      batches: how many batches there are, of which loss and aux are averaged.
      known: sums over all parts, computed before.
      limit: bytes that one operation may all-gather; None for any number.
      statistics: whether the state has fp8 statistics.
      collects: whether `shares` returns this part of the first sum that is not known.
      lacks_sum: whether a sum was not known.
      place: what needs the sum that was collected last, with its line.
      transfers: what the last evaluation communicates.
    """

    group: Group
    micro_batches: int = 1
    batches: int = 1
    known: list[jax.Array] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    limit: int | None = None
    statistics: bool = False
    collects: bool = False
    lacks_sum: bool = False
    place: str = ""

    @property
    def parts(self) -> int:
        """Into how many parts the global batch is split."""
        return self.shards * self.micro_batches

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the examples are split here."""
        return self.group.outer_axes

    @property
    def shards(self) -> int:
        """Devices along `axes`."""
        return self.group.batch_shards // self.group.experts

    def values(
        self, fun: Callable[..., Any], trained: int, params: list[Any], batch: Any, rng: Any, i: Any
    ) -> tuple[GlobalEvaluator, Any]:
        """Evaluates `fun(params, batch, rng)` on the examples of micro-batch `i`.

        The first `trained` of the parameters are differentiated. Returns a tree of `Value`.
        """
        part = i if self.micro_batches > 1 else 0  # of batches, each is whole by itself
        evaluator = GlobalEvaluator(self.axes, self.shards, self.micro_batches, part)
        evaluator.known = list(self.known)
        evaluator.limit, evaluator.statistics = self.limit, self.statistics
        self.transfers = evaluator.transfers
        dims = [0 if jnp.ndim(x) else None for x in jax.tree.leaves(batch)]
        found = evaluate_loss(evaluator, fun, self.group, dims, 1, trained, params, batch, rng)
        return evaluator, found

    def outputs(
        self,
        fun: Callable[..., Any],
        params: Any,
        batch: Any,
        own_inside: Callable[[], Sequence[bool]] | None = None,
    ) -> tuple[Any, list[bool]]:
        """Evaluates `fun(*params, batch)`, and completes its outputs.

        `own_inside`, where parameters are kept on an axis, says afterwards which outputs `fun`
        returns for the examples of one device of that axis. Returns the tree of outputs, and of
        each whether this device has those of its examples.
        """
        leaves, structure = jax.tree.flatten(params)

        def of_leaves(leaves: list[Any], batch: Any, _: Any) -> Any:
            return fun(*jax.tree.unflatten(structure, leaves), batch)

        evaluator, found = self.values(of_leaves, 0, leaves, batch, None, 0)

        def complete(x: Any, inside: bool) -> tuple[Any, bool]:
            if isinstance(x, Weighted):
                both = (evaluator.convert(v, REPLICATED) for v in (x.sum, x.weight))
                return jnp.divide(*both), False
            value = x.value if isinstance(x, Reduced) else x
            if inside and own_inside is not None and self.shards == 1:
                # Each device has its part of dimension 0, which is that of the examples or another.
                array = evaluator.convert(value, REPLICATED)
                own = value.aval.shape[0] * self.group.experts == self._examples(batch)
            else:
                own = inside and value.placement == sharded(0)
                array = evaluator.convert(value, sharded(0) if own else REPLICATED)
            if inside and not own and own_inside is not None:
                array = gather_examples(array, 0, 1, (self.group.kept,))
            return array, own

        leaves, tree = jax.tree.flatten(found, is_leaf=is_output)
        inside = [True] * len(leaves) if own_inside is None else own_inside()
        pairs = [complete(x, own) for x, own in zip(leaves, inside, strict=True)]
        return jax.tree.unflatten(tree, [x for x, _ in pairs]), [own for _, own in pairs]

    def shares(self, fun: Callable[..., Any], by_examples: bool, trained: int, *args: Any) -> Any:
        """Returns the share of this part of what a `NormalizedLoss` returns; `args` as in `values`.

        A weight of None is 1 for the sum of all shares. Auxiliary outputs and updates are
        `Weighted` or `Reduced`; updates of one of several batches are arrays. Of several
        micro-batches a sum may be unknown: then it sets `lacks_sum`, and returns a loss of 0.
        """
        try:
            return self._shares(fun, by_examples, trained, *args)
        except NeedsSum as sums:
            if self.collects:
                self.place = sums.place
                return sums.partial
        self.lacks_sum = True  # JAX keeps what a trace that ends by an exception has read
        return jnp.float32(0), (None, None, {})

    def _shares(self, fun: Callable[..., Any], by_examples: bool, trained: int, *args: Any) -> Any:
        evaluator, (total, (weight, aux, updates)) = self.values(fun, trained, *args)
        averaged = self.batches > 1
        examples = self._examples(args[1]) if by_examples else None
        own_weight = weight is not None
        # A weight that comes from here is added by every device of the other axes.
        others = self.group.devices // self.shards if weight is None else 1
        if weight is None and total.quotient is not None and not averaged:
            total, weight = total.quotient
        if weight is not None and examples is None and not averaged and evaluator.divides_first:
            axes = [x for x in self.group.axes if own_weight and x not in self.axes]
            total, weight = _divided(evaluator, total, weight, axes)
            others = self.group.devices // self.shards
        elif weight is None and examples is not None:
            weight = _number(examples, total)
            total = _scaled(evaluator, total, examples)
        share = share_of(evaluator, total)
        if weight is not None:
            weight = float_of(evaluator, weight, others)
        elif averaged:
            # Divided by after the gradient is taken: a third would be rounded in a bfloat16 loss.
            weight = jnp.float32(1 / self.group.devices)

        def form(x: Any) -> Any:
            several = averaged or evaluator.micro_batches > 1
            if several and isinstance(x, Value) and x.placement.is_sharded:
                raise per_example_error(x)
            return _form(evaluator, x, 1 if averaged else None, examples)

        def sums(x: Any) -> Any:
            return _form(evaluator, x)

        def last(x: Value) -> Any:
            return evaluator.convert(x, REPLICATED)

        aux = jax.tree.map(form, aux, is_leaf=is_output)
        updates = jax.tree.map(last if averaged else sums, updates, is_leaf=is_output)
        return at_least_float32(share), (weight, aux, updates)

    def _examples(self, batch: Any) -> int:
        sizes = [jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)]
        return sizes[0] * self.parts * self.group.experts if sizes else 1


def evaluate_loss(
    evaluator: GlobalEvaluator,
    fun: Callable[..., Any],
    group: Group,
    dims: Sequence[int | None],
    outer: int,
    trained: int,
    params: list[Any],
    batch: Any,
    rng: Any,
    kept: Sequence[int | None] = (),
) -> Any:
    """Traces `fun(params, batch, rng)` for global arrays, and evaluates it on this device's parts.

    `dims` are the dimensions of the arrays of the batch of which this device has a part, None for
    those that it has in full; `outer` is that of their placement, and `kept` are the dimensions of
    the parameters. The first `trained` of the parameters are differentiated. Returns a tree of
    `Value`.
    """
    parts, (arrays, structure) = evaluator.partition.parts, jax.tree.flatten(batch)

    kept = kept or [None] * len(params)

    def full(x: Any, dim: int | None) -> jax.ShapeDtypeStruct:
        shape = (n * parts if i == dim else n for i, n in enumerate(jnp.shape(x)))
        return abstract(tuple(shape), x.dtype, jax.typeof(x).weak_type)

    (jaxpr, consts), shapes = trace_loss(
        fun,
        group.axes,
        [full(x, dim) for x, dim in zip(params, kept, strict=True)],
        structure.unflatten(map(full, arrays, dims)),
        jax.tree.map(abstract_like, rng),
    )
    inner = SEQUENCE if group.sequence > 1 else group.kept
    if trained and arrays and parts > 1 and (not inner or evaluator.axes == (inner,)):
        _warn_of_unread(jaxpr, trained, range(len(params), len(params) + len(arrays)))
    leaves = [
        (x, REPLICATED if dim is None else Placement("sharded", dim, kept=True), at < trained)
        for at, (x, dim) in enumerate(zip(params, kept, strict=True))
    ]
    for x, dim in zip(arrays, dims, strict=True):
        leaves.append((x, REPLICATED if dim is None else sharded(dim, outer), False))
    leaves += [(x, REPLICATED, False) for x in jax.tree.leaves(rng)]
    values = [
        Value(place, v.aval, x, depends=depends)
        for v, (x, place, depends) in zip(jaxpr.invars, leaves, strict=True)
    ]
    evaluator.divides_first = CUSTOM_VJP in primitives(jaxpr) or any(map(_is_narrow, dtypes(jaxpr)))
    found = evaluator.evaluate(jaxpr, consts, values)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _is_narrow(dtype: Any) -> bool:
    """Whether a sum over examples may overflow where their mean does not: float16 and float8."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return float(jnp.finfo(dtype).max) < float(jnp.finfo(jnp.bfloat16).max)


def _warn_of_unread(jaxpr: Any, trained: int, batch: range) -> None:
    """Warns of a loss of its parameters, the first `trained` inputs, that reads none of `batch`."""
    read = [frozenset([0][: i < trained] + [1][: i in batch]) for i in range(len(jaxpr.invars))]
    if frozenset().union(*inputs_used(jaxpr, read)) == {0}:
        warn(
            "the loss reads no array of its batch, so its work is not split: every device computes "
            "all of it. If it closes over a batch, use the argument instead: loss_fn(params, "
            "batch). If it draws noise, tie the noise to the batch before the network uses it: "
            "noise + 0 * batch['x'][:, :1]. For a penalty on the parameters alone, ignore this "
            "warning."
        )


def is_output(x: Any) -> bool:
    """Whether this is one output of a loss, in any form."""
    return has_reduction(x) or isinstance(x, Value)


def _number(number: Any, like: Value) -> Value:
    x = jnp.asarray(number, wide_dtype(like.aval.dtype))
    return Value(REPLICATED, jax.typeof(x), x)


def _scaled(evaluator: GlobalEvaluator, value: Value, by: float) -> Value:
    is_sum = value.placement == PARTIAL and value.aval.dtype != jnp.bool_
    place = PARTIAL if is_sum else REPLICATED
    x = at_least_float32(evaluator.convert(value, place)) * by
    return Value(place, jax.typeof(x), x)


def _divided(
    evaluator: GlobalEvaluator, total: Value, weight: Value, axes: Sequence[str]
) -> tuple[Value, Value]:
    """Returns total / weight with weight 1, or with weight 0 if the weight is 0.

    A user's backward pass may not be linear, such as one that clips: it must receive the gradient
    of the loss, and not that of a sum which is divided later. And the gradient of a sum may
    overflow float16 where that of the mean does not. `axes` are those over which the weight has not
    been summed yet.
    """
    weight = replace(weight, depends=False)  # it is not differentiated
    divisor = at_least_float32(evaluator.convert(weight, REPLICATED))
    divisor = sum_partial(divisor, axes) if axes else divisor
    is_zero = divisor == 0
    share = at_least_float32(evaluator.convert(total, PARTIAL)) / jnp.where(is_zero, 1, divisor)
    return Value(PARTIAL, total.aval, share), _number(jnp.where(is_zero, 0, 1), weight)


def float_of(evaluator: GlobalEvaluator, value: Value, others: int = 1) -> jax.Array:
    """What adds up to the value as a float; a sum of integers that may wrap is completed first.

    `others` is how many devices of other axes add the same.
    """
    known = value.positions
    exact = jnp.issubdtype(value.aval.dtype, jnp.inexact) or (known and known.bound is not None)
    if not exact:
        value = Value(REPLICATED, value.aval, evaluator.convert(value, REPLICATED))
    share = at_least_float32(evaluator.convert(value, PARTIAL))
    return share / others if others > 1 else share


def share_of(evaluator: GlobalEvaluator, value: Value) -> Any:
    """What adds up to the value over the devices.

    A value that all have is the first one's alone. A share of it, such as a third, would be rounded
    where the derivative of a loss in bfloat16 is taken.
    """
    if value.placement != PARTIAL:
        value = Value(REPLICATED, value.aval, evaluator.convert(value, REPLICATED))
    return evaluator.convert(value, PARTIAL)


def _form(evaluator: GlobalEvaluator, x: Any, batch: int | None = None, call: Any = None) -> Any:
    """An output of the global batch in a form that adds up, or that is the same everywhere.

    Floating outputs that do not say how they are reduced are averaged over several batches, or
    calls, of this weight; a quotient of one call is divided when all are added up.
    """
    if isinstance(x, Weighted):
        return Weighted(float_of(evaluator, x.sum), float_of(evaluator, x.weight))
    value, by = (x.value, x.by) if isinstance(x, Reduced) else (x, "mean")
    weight = call if batch is None else batch
    named = isinstance(x, Reduced) and weight is not None
    if value.extreme is not None:
        own, largest = value.extreme
        kept = "max" if largest else "min"
        if not named or by in (kept, "any" if largest else "all"):
            return Reduced(own, kept)
    if value.quotient is not None and batch is None and (not named or by == "mean"):
        return _form(evaluator, Weighted(*value.quotient))
    if named and by not in ("sum", "mean"):
        return Reduced(evaluator.convert(value, REPLICATED), by)
    floating = by == "mean" and (named or jnp.issubdtype(value.aval.dtype, jnp.floating))
    if weight is not None and by == "mean" and jnp.iscomplexobj(value.aval):
        raise GShardError(
            "a complex auxiliary output cannot be averaged over several micro-batches or calls. "
            "Return its real and its imaginary part."
        )
    if weight is not None and floating:
        return _form(evaluator, Weighted(_scaled(evaluator, value, weight), _number(weight, value)))
    if value.placement == PARTIAL and value.aval.dtype == jnp.bool_:  # of a product: any example
        return Reduced(evaluator.convert(value, REPLICATED), "any")
    of_sums = jax.dtypes.canonicalize_dtype(int).itemsize
    narrow = jnp.issubdtype(value.aval.dtype, jnp.integer) and value.aval.dtype.itemsize < of_sums
    if weight is None and narrow and evaluator.micro_batches == 1:  # wraps as on one device
        return Reduced(evaluator.convert(value, REPLICATED), SAME)
    if value.placement == PARTIAL or (weight is not None and by == "sum"):
        return Reduced(evaluator.convert(value, PARTIAL), "sum")
    if weight is not None and not jnp.issubdtype(value.aval.dtype, jnp.inexact):
        several = "calls" if batch is None else "micro-batches"
        advice = (
            'Return gshard.Reduced(x, "sum") if it counts examples, such as batch["x"].shape[0], '
            'and gshard.Reduced(x, "max") if it is the same for all.'
        )
        if value.placement.is_sharded:
            advice = "Return entries of examples from make_eval_step."
        elif value.aval.dtype == jnp.bool_:
            advice = 'Return gshard.Reduced(x, "any") or gshard.Reduced(x, "all").'
        warn(
            f"an auxiliary output of the loss, {value.aval.dtype}{list(value.aval.shape)}, is "
            f"neither a float nor a sum over examples: of several {several}, only the last one's "
            f"value is returned. {advice}"
        )
    return Reduced(evaluator.convert(value, REPLICATED), SAME)
