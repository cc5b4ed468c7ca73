"""Sums a loss (or its share of the global batch) and its gradient over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from gshard._util.arrays import cast
from gshard._util.errors import warn
from gshard._util.jaxpr_dataflow import inputs_used
from gshard._util.pytree import flatten
from gshard._util.tracebacks import named_as
from gshard.sequence.order import Order
from gshard.sharding.budget import resharding
from gshard.sharding.layout import Layout, all_replicated
from gshard.sharding.plan import Plan
from gshard.sharding.topology import SEQUENCE
from gshard.train.comm.buckets import keep_dimension_order
from gshard.train.comm.collectives import group_index, reduce_scalar
from gshard.train.comm.quantized import fold
from gshard.train.comm.reduce import accumulation_layouts
from gshard.train.fsdp.gather_bucket import GatherScope, gather_specs, grad_sinks
from gshard.train.fsdp.interpreter import with_sharded_params
from gshard.train.fsdp.lazy_param import gathered
from gshard.train.global_loss.experts import Experts, kept_dims, refuse_per_device
from gshard.train.global_loss.sequences import Sequences, counted_once
from gshard.train.global_loss.shares import GlobalBatch
from gshard.train.global_loss.transfers import Transfer, transfers_over
from gshard.train.loss import NormalizedLoss, add_sums, as_sums, neutral_sums
from gshard.train.non_trainable import all_gather_tree, non_trainable_uses, split_sharded
from gshard.train.options import StepOptions, most_gathered
from gshard.train.random_keys import DEVICE, Draws, draws_of, fold_keys, refuse_keys
from gshard.train_state import OVERWRITTEN, PureLoss

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MicroBatchSums:
    """Sums over the examples that one device has processed so far."""

    grads: list[jax.Array]
    loss: jax.Array
    weight: jax.Array | None  # None: 1, of all devices and micro-batches together
    aux: Any
    updates: dict[str, Any]  # the latest values; of a loss of the global batch, sums like aux
    overwritten: dict[str, Any]  # the largest values


class DeviceInputs(NamedTuple):
    """What one device computes its loss from.

    `layouts` are those of its non-trainable state, `dims` the dimensions of the arrays of the batch
    that are sharded over a sequence axis.
    """

    leaves: list[jax.Array]
    non_trainable: dict[str, Any]
    layouts: dict[str, Any]
    batch: Any
    rng: Any
    dims: Sequence[int | None] = ()


class MicroBatchLoss:
    """Computes the loss and gradient of one micro-batch on one device, as sums."""

    def __init__(
        self,
        loss: PureLoss,
        structure: Any,
        plan: Plan,
        options: StepOptions,
        accumulate: str,
        scale: jax.Array | None,
        step: jax.Array | None,
        seed: jax.Array | None = None,
    ):
        self.step: jax.Array | None = step
        self.seed: jax.Array | None = seed
        self.warned: bool = False
        self.raw_keys: set[Any] = set()
        semantics, k = options.loss_semantics, options.micro_batches
        self.is_global: bool = semantics != "per_device"
        # Micro-batches of one global batch do not see what the others changed.
        self.adds_updates: bool = semantics == "global" or (self.is_global and k == 1)
        self.form: NormalizedLoss = NormalizedLoss(
            loss, structure, options.has_aux, options.by_examples, self.is_global
        )
        self.group: Any = plan.group
        self.sequence_order: Order = plan.sequence_order
        self.options: StepOptions = options
        self.scale: jax.Array | None = scale
        self.global_batch: GlobalBatch = GlobalBatch(
            plan.group,
            *((k, 1) if self.adds_updates else (1, k)),
            limit=most_gathered(plan, options.gather_limit),
        )
        self.inner_transfers: list[Transfer] = []
        self.forward_passes: list[str] = []  # before the gradients, by what needs them
        # Those over which a loss is evaluated before it is over the examples.
        wide = (plan.group.kept, plan.group.experts), (SEQUENCE, plan.group.sequence)
        self.inner_axes: list[str] = [axis for axis, devices in wide if devices > 1]
        refuse_per_device(plan.group, self.is_global)
        self.device: jax.Array = group_index(plan.group.batch_axes)
        self.stored: list[Any] = jax.tree.leaves(plan.params)
        self.targets: list[Layout] = accumulation_layouts(plan, accumulate)
        self.reshard: bool | int = resharding(plan, options.reshard_after_forward)
        converts = plan.precision is not None and plan.precision.reduce_dtype is not None
        self.order: list[int] = []  # in which gradients become available, after the first call
        self.uses: list[Any] = gather_specs(
            self.stored, self.targets, converts=converts, reshard=self.reshard
        )

    def __call__(self, given: DeviceInputs, i: Any) -> MicroBatchSums:
        """Computes the sums of micro-batch `i`."""
        with self._scope(fold(self.seed, i)) as scope:
            at, points, overwritten = self._at(given, i, scope)
            run = jax.value_and_grad(at, argnums=(0, 1), has_aux=True)
            (_, (loss, weight, aux, updates)), (grads, new) = run(points, overwritten)
            # The leaf that is used first gets its gradient last.
            self.order = [i for i in reversed(scope.order) if i < len(self.uses)]
        if self.inner_axes:
            aux, sums = counted_once(aux, self.inner_axes), self.adds_updates
            updates = counted_once(updates, self.inner_axes) if sums else updates
        if not self.is_global or self.options.micro_batches > 1:
            refuse_keys(updates, self.raw_keys)
        grads = [cast(g, t.dtype) for g, t in zip(grads, self.targets, strict=True)]
        updates = as_sums(updates, weight) if self.adds_updates else updates
        return MicroBatchSums(grads, loss, weight, as_sums(aux, weight), updates, new)

    def weight(self, given: DeviceInputs, i: Any) -> jax.Array | None:
        """Computes the weight of one micro-batch's loss; XLA removes what it does not need."""
        with self._scope() as scope:
            at, *points = self._at(given, i, scope)
            return at(*points)[1][1]

    def next_sum(self, given: DeviceInputs, i: Any) -> jax.Array:
        """Computes this part of the next sum over the global batch that the loss needs."""
        self.global_batch.collects = True
        with self._scope() as scope:
            at, *points = self._at(given, i, scope)
            found = at(*points)
        self.global_batch.collects = False
        return found

    @property
    def transfers(self) -> list[Transfer]:
        """What the loss communicates in its forward pass, after the first call."""
        return [*self.global_batch.transfers, *self.inner_transfers]

    def _scope(self, seed: jax.Array | None = None) -> GatherScope:
        return GatherScope(not self.options.prefetch, self.options.bucket_size, seed=seed)

    def _at(
        self, given: DeviceInputs, i: Any, scope: GatherScope
    ) -> tuple[Callable[..., Any], list[jax.Array], dict[str, Any]]:
        """Returns the loss as a function of what is differentiated, and those values."""
        # A loss of the global batch draws what one device would.
        numbers = {"global": (), "per_micro_batch": (i,)}.get(
            self.options.loss_semantics, (self.device, i)
        )
        rng, non_trainable = fold_keys((given.rng, given.non_trainable), *numbers)
        # Keys with one per example stay as they are.
        batch = jax.tree.map(lambda x: x if jnp.ndim(x) else fold_keys(x, *numbers), given.batch)
        names, more, structure = flatten(non_trainable)
        n, leaves = len(self.uses), given.leaves
        more_uses = non_trainable_uses(given.layouts, self.reshard)
        uses = [*self.uses, *more_uses]
        points, more_sinks = grad_sinks(leaves, self.uses), grad_sinks(more, more_uses)
        self.global_batch.statistics = OVERWRITTEN in non_trainable
        overwritten = {name: tree for name, tree in non_trainable.items() if name == OVERWRITTEN}

        trained = len(leaves) + len(more) if overwritten else n

        def of_sequences(leaves: list[jax.Array], batch: Any, rng: Any) -> Any:
            return self.form(leaves[:n], jax.tree.unflatten(structure, leaves[n:]), batch, rng)

        def of_examples(*args: Any) -> Any:
            limit, divides = self.global_batch.limit, self.global_batch.batches > 1
            sequences = Sequences(
                self.group, given.dims, limit, self.is_global, self.sequence_order
            )
            if not sequences.is_on:
                return of_sequences(*args)
            return sequences.share(of_sequences, trained, divides, *args)

        def of_experts(*args: Any) -> Any:
            limit, divides = self.global_batch.limit, self.global_batch.batches > 1
            experts = Experts(self.group, kept_dims((self.stored, given.layouts)), limit)
            if not experts.is_on:
                return of_examples(*args)
            return experts.share(of_examples, trained, divides, *args)

        def form(*args: Any) -> Any:
            if not self.is_global:
                return of_examples(*args)
            fun = named_as(self.form.loss, of_experts)
            return self.global_batch.shares(fun, self.options.by_examples, trained, *args, i)

        def prepare(jaxpr: Any, inputs: list[Any], trace: Callable[..., Any]) -> list[Any]:
            if self.global_batch.collects:
                self._note_forward_pass(jaxpr)
            paths = dict(enumerate(names, n))  # by position among the inputs
            self.inner_transfers = [
                transfer for axis in self.inner_axes for transfer in transfers_over(axis, jaxpr)
            ]
            return self._keys(
                draws_of(jaxpr), paths, inputs, lambda b: trace(b, rng), batch, numbers
            )

        def at(points: list[jax.Array], overwritten: dict[str, Any]) -> Any:
            values = [
                point if use is None else leaf
                for leaf, point, use in zip(leaves, points, self.uses, strict=True)
            ]
            values += jax.tree.leaves({**non_trainable, **overwritten})
            sinks, axes = [*points, *more_sinks], self.group.axes
            found = with_sharded_params(
                form, uses, axes, values, sinks, batch, rng, scope=scope, prepare=prepare
            )
            if self.global_batch.collects:
                return found
            loss, rest = found
            return loss if self.scale is None else loss * self.scale, (loss, *rest)

        return at, points, overwritten

    def _note_forward_pass(self, jaxpr: Any) -> None:
        """Notes, and warns of, a sum before the micro-batches that is computed from parameters."""
        read = [frozenset({i} if i < len(self.uses) else ()) for i in range(len(jaxpr.invars))]
        if any(inputs_used(jaxpr, read)):
            self.forward_passes.append(self.global_batch.place)
            warn(
                f"micro_batches={self.options.micro_batches}: {self.global_batch.place} needs a "
                "sum over all micro-batches that is computed from the parameters, so the model "
                "runs forward once more before the gradients. The numbers are right, but every "
                "such sum takes another pass. A mean within each example or group takes none: "
                "gshard.expert.load_balancing_loss has by_group=True for that."
            )

    def _keys(
        self,
        draws: Draws,
        non_trainable: dict[int, str],
        inputs: list[Any],
        trace: Callable[[Any], Any],
        batch: Any,
        numbers: Sequence[Any],
    ) -> list[Any]:
        """Folds old-style keys among the inputs of the traced loss; warns of keys it cannot fold.

        `non_trainable` are paths by position among the inputs; `trace(batch)` is another jaxpr.
        """
        for at in draws.raw & non_trainable.keys():
            self.raw_keys.add(path := non_trainable[at])
            known = self.step is not None and path.partition("/")[0] not in self.options.mutable
            key = jax.random.wrap_key_data(gathered(inputs[at]))
            folded = fold_keys(key, *([self.step] if known else []), *numbers)
            inputs[at] = jax.random.key_data(folded)
        unsigned = {
            at for at in non_trainable if jnp.issubdtype(inputs[at].dtype, jnp.unsignedinteger)
        }
        first = len(self.uses)
        folded = {DEVICE, *range(first, len(inputs))} - (unsigned - draws.raw)
        alike = draws.without(folded)
        alone = self.group.batch_shards * self.options.micro_batches == 1
        if self.warned or not alike or alone or self.is_global:
            return inputs
        try:  # what does not grow with the examples is the same on one device
            twice = jax.tree.map(lambda x: jnp.concatenate([x, x]) if jnp.ndim(x) else x, batch)
            if draws_of(trace(twice)).without(folded) == alike:
                return inputs
        except Exception:  # the loss needs a fixed number of examples
            pass
        self.warned = True
        warn(
            "the loss draws random numbers (dropout, noise) with a key that is not among its "
            "arguments: every device and every micro-batch draws the same ones for its own "
            "examples. Accept the key as an argument, f(params, batch, *, rng), and pass it with "
            "rng=, to make_train_step or to what value_and_grad returned: gshard folds it with "
            'device and micro-batch. See the page "Losses" of the documentation.'
        )
        return inputs


def sum_over_micro_batches(
    one: MicroBatchLoss,
    given: DeviceInputs,
    finish: Callable[[list[jax.Array]], list[jax.Array]],
) -> MicroBatchSums:
    """Sums `one` over micro-batches; of several, `finish` reduces each gradient before the sum."""
    k, non_trainable = one.options.micro_batches, given.non_trainable
    if k == 1:
        return one(given, 0)
    slices, micro_batch = _slices(given.batch, k)

    def sums_with(layouts: dict[str, Any]) -> Callable[..., MicroBatchSums]:
        @partial(jax.jit, inline=True)  # so that the scan takes the trace that gave the shapes
        def sums(leaves: Any, rest: Any, i: Any, arrays: Any) -> MicroBatchSums:
            batch = micro_batch(arrays)
            return one(DeviceInputs(leaves, rest, layouts, batch, given.rng, given.dims), i)

        return sums

    sums = sums_with(given.layouts)
    numbers = jnp.arange(k)
    shapes = jax.eval_shape(sums, given.leaves, non_trainable, numbers[0], [x[0] for x in slices])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    changing = {
        name: all_gather_tree(non_trainable[name], given.layouts[name])
        for name in (() if one.adds_updates else shapes.updates)
    }
    replicated = {name: all_replicated(tree, one.group) for name, tree in changing.items()}
    layouts = {**given.layouts, **replicated}
    shards, non_trainable_with = split_sharded(non_trainable, layouts)
    sums = sums_with(layouts) if changing else sums
    least = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), zeros.overwritten)
    updates = neutral_sums(shapes.updates) if one.adds_updates else changing
    start = MicroBatchSums(
        zeros.grads, zeros.loss, zeros.weight, neutral_sums(shapes.aux), updates, least
    )

    def body(total: MicroBatchSums, x: Any) -> tuple[MicroBatchSums, None]:
        # The barrier ties the shards to the loop counter: otherwise XLA all-gathers them once,
        # before the loop, and keeps everything unsharded.
        leaves, now, (i, arrays) = jax.lax.optimization_barrier((given.leaves, shards, x))
        leaves = _keep_dimension_orders(leaves, one.stored)
        now = _keep_dimension_orders(non_trainable_with(now), layouts)
        if not one.adds_updates:  # a micro-batch begins with what the one before it changed
            now = {**now, **total.updates}
        new = sums(leaves, now, i, arrays)
        return MicroBatchSums(
            jax.tree.map(jnp.add, total.grads, finish(new.grads)),
            total.loss + new.loss,
            jax.tree.map(jnp.add, total.weight, new.weight),
            add_sums(total.aux, new.aux),
            add_sums(total.updates, new.updates) if one.adds_updates else new.updates,
            jax.tree.map(jnp.maximum, total.overwritten, new.overwritten),
        ), None

    return jax.lax.scan(body, start, (numbers, slices))[0]


def total_weight(one: MicroBatchLoss, given: DeviceInputs) -> jax.Array | None:
    """Sums the weights of all micro-batches of this device, before taking any gradient."""
    return _sum(one.weight, one, given)


def with_sums(one: MicroBatchLoss, given: DeviceInputs, run: Callable[[], T]) -> T:
    """Calls `run` until it needs no sum that is not known, and computes each one it asks for.

    Such a sum over the global batch is computed from all micro-batches before the first of them
    takes its gradient. Mostly it is a count of tokens, which depends on no parameter, so that XLA
    removes the model from that pass.
    """
    batch = one.global_batch
    while True:
        batch.lacks_sum = False
        found = run()
        if not batch.lacks_sum:
            return found
        total = _sum(one.next_sum, one, given)
        batch.known.append(reduce_scalar(total, batch.axes).astype(total.dtype))  # of booleans too


def _sum(term: Callable[[DeviceInputs, Any], Any], one: MicroBatchLoss, given: DeviceInputs) -> Any:
    """Sums a term over the micro-batches of this device."""
    k = one.options.micro_batches
    slices, micro_batch = _slices(given.batch, k)

    @partial(jax.jit, inline=True)  # of which the scan takes the trace that gave the shapes
    def of(x: Any) -> Any:
        i, arrays = x
        return term(given._replace(batch=micro_batch(arrays)), i)

    inputs = (jnp.arange(k), slices)
    shapes = jax.eval_shape(of, jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(total: Any, x: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of(x)), None

    return jax.lax.scan(body, zeros, inputs)[0]


def _keep_dimension_orders(tree: Any, layouts: Any) -> Any:
    """Constrains the dimension order of replicated leaves, so that XLA keeps one copy of each.

    Of shards copies are small, and an all-gather produces the order that its use wants.
    """

    def constrained(x: jax.Array, layout: Layout) -> jax.Array:
        return keep_dimension_order(x, layout.group) if layout.dim is None else x

    return jax.tree.map(constrained, tree, layouts)


def _slices(batch: Any, k: int) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Splits examples into k slices; also returns what makes a micro-batch of one of each array."""
    arrays, structure = jax.tree.flatten(batch)
    slices = [x.reshape(k, x.shape[0] // k, *x.shape[1:]) for x in arrays if jnp.ndim(x)]

    def micro_batch(chosen: list[jax.Array]) -> Any:
        rest = iter(chosen)
        return jax.tree.unflatten(structure, [next(rest) if jnp.ndim(x) else x for x in arrays])

    return slices, micro_batch
