"""The gradient stage: parts and a batch in, reduced gradients out, collectives written by hand.

The whole stage is one `shard_map` over the data axes with `check_vma=False`: with the default the
gradient of a replicated parameter arrives already summed, and a reduction on top would count it N
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard.arguments import whole_number
from gshard.batch import check_rows
from gshard.collectives import (
    BUFFER_MAX_SIZE,
    agree,
    group_index,
    reduce_leaves,
    reduce_scalar,
    scatter_leaves,
)
from gshard.extras import all_gathered, apart, extra_layouts, extra_uses, in_storage
from gshard.first_use import Use, with_divided
from gshard.layout import Layout
from gshard.loss import LossForm, Weighted, fold_keys, is_weighted, refuse_keys, typed_key
from gshard.plan import Plan, all_whole
from gshard.promise import accumulation
from gshard.state import Parts, PureLoss
from gshard.tree import same_leaves


@dataclass(frozen=True)
class Options:
    """How gradients are made; the same names as in `make_train_step`."""

    has_aux: bool = False
    micro_batches: int = 1
    accumulate: str = "level"
    buffer_max_size: int = BUFFER_MAX_SIZE

    def __post_init__(self) -> None:
        whole_number("buffer_max_size", self.buffer_max_size, 0, " of elements (0: no buckets)")


@dataclass(frozen=True)
class Gradients:
    """What the gradient stage returns, as global arrays.

    Attributes:
      grads: Divided: a tree like the parameters, in the layouts of `plan.grads`.
      loss: float32 scalar, of the global batch.
      aux: the loss's auxiliary output, averaged over the batch, or None.
      updates: extras that the loss changed, by name.
    """

    grads: Any
    loss: jax.Array
    aux: Any
    updates: dict[str, Any]


def gradients(
    loss: PureLoss, parts: Parts, batch: Any, rng: Any, plan: Plan, options: Options
) -> Gradients:
    """The gradient of the mean loss over the rows of the global batch.

    Args:
      loss: pure, of whole parameters and the rows of one device.
      parts: of the state; `params` in storage shapes.
      batch: global arrays, rows over the data axes; scalars are given to every device.
      rng: a typed key or None; folded with device and micro-batch.
      plan: where everything lies.
      options: how.
    """
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    structure = same_leaves(parts.params, (x.path for x in stored), "the parameters are")
    layouts = extra_layouts(parts.extras, plan)
    k = options.micro_batches
    local = accumulation(plan, k, options.accumulate) == "local"
    targets = [layout.whole() for layout in reduced] if local else reduced
    check_rows(batch, plan.group.devices, k)
    rng = typed_key(rng)

    def on_device(leaves: list[jax.Array], extras: Any, batch: Any, rng: Any) -> Any:
        one = _MicroBatch(loss, structure, stored, targets, plan, options.has_aux)
        total = _over_micro_batches(one, leaves, extras, layouts, batch, rng, k)
        weight = reduce_scalar(total.weight, plan.group.axes)
        grads = _end_reduction(total.grads, targets, reduced, plan, options.buffer_max_size)
        return (
            [(g / weight).astype(g.dtype) for g in grads],
            reduce_scalar(total.loss, plan.group.axes) / weight,
            _mean_over_devices(total.aux, weight, plan.group.axes),
            agree(total.updates, plan.group),
        )

    rows = jax.tree.map(lambda x: plan.batch_spec if jnp.ndim(x) else jax.P(), batch)
    grads, value, aux, updates = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(
            [layout.spec for layout in stored],
            jax.tree.map(lambda layout: layout.spec, layouts),
            rows,
            jax.P(),
        ),
        out_specs=([layout.spec for layout in reduced], jax.P(), jax.P(), jax.P()),
        check_vma=False,
    )(jax.tree.leaves(parts.params), in_storage(parts.extras, layouts), batch, rng)
    updates = {
        name: plan.pin(tree, layouts[name]) if name in plan.extras else tree
        for name, tree in updates.items()
    }
    return Gradients(jax.tree.unflatten(structure, grads), value, aux, updates)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Total:
    """Sums over the rows seen so far on one device; `updates` are the latest."""

    grads: list[jax.Array]
    loss: jax.Array
    weight: jax.Array
    aux: Any
    updates: dict[str, Any]


class _MicroBatch:
    """The loss and gradient of one micro-batch on one device, as sums."""

    def __init__(
        self,
        loss: PureLoss,
        structure: Any,
        stored: Sequence[Layout],
        targets: Sequence[Layout],
        plan: Plan,
        has_aux: bool,
    ):
        self.form = LossForm(loss, structure, has_aux)
        self.group = plan.group
        self.axes = plan.group.axes
        self.device = group_index(self.axes)
        uses = [Use(s, t) for s, t in zip(stored, targets, strict=True)]
        self.uses = [None if use.pointless else use for use in uses]

    def __call__(
        self, leaves: list[jax.Array], extras: Any, layouts: Any, batch: Any, rng: Any, i: Any
    ) -> _Total:
        """Args as in `gradients`, but of one device; `i` is the number of the micro-batch."""
        rng, extras = fold_keys((rng, extras), self.device, i)
        more, structure = jax.tree.flatten(extras)
        uses = [*self.uses, *extra_uses(layouts)]
        more_taps = [
            x if u is None else u.tap() for x, u in zip(more, extra_uses(layouts), strict=True)
        ]

        def form(leaves: list[jax.Array], batch: Any, rng: Any) -> Any:
            extras = jax.tree.unflatten(structure, leaves[len(self.uses) :])
            return self.form(leaves[: len(self.uses)], extras, batch, rng)

        points = [  # where the gradient is taken: at the tap, or at a leaf that is used as it is
            leaf if use is None else use.tap() for leaf, use in zip(leaves, self.uses, strict=True)
        ]

        def at(points: list[jax.Array]) -> Any:
            given = [
                point if use is None else leaf
                for leaf, point, use in zip(leaves, points, self.uses, strict=True)
            ]
            taps = [*points, *more_taps]
            return with_divided(form, uses, self.axes, [*given, *more], taps, batch, rng)

        (loss, (weight, aux, updates)), grads = jax.value_and_grad(at, has_aux=True)(points)
        refuse_keys(updates)
        return _Total(grads, loss, weight, _as_sums(aux, weight), updates)


def _as_sums(aux: Any, weight: jax.Array) -> Any:
    """A mean times the weight of its rows; a `Weighted` aux is a sum with its own weight."""

    def total(x: Any) -> Any:
        if is_weighted(x):
            return Weighted(jnp.asarray(x.sum, jnp.float32), jnp.asarray(x.weight, jnp.float32))
        return x * weight

    return jax.tree.map(total, aux, is_leaf=is_weighted)


def _mean_over_devices(sums: Any, weight: jax.Array, axes: Sequence[str]) -> Any:
    def mean(x: Any) -> jax.Array:
        total, over = (x.sum, reduce_scalar(x.weight, axes)) if is_weighted(x) else (x, weight)
        return reduce_scalar(total, axes) / over

    return jax.tree.map(mean, sums, is_leaf=is_weighted)


def _over_micro_batches(
    one: _MicroBatch,
    leaves: list[jax.Array],
    extras: dict[str, Any],
    layouts: dict[str, Any],
    batch: Any,
    rng: Any,
    k: int,
) -> _Total:
    """The sum of `one` over k slices of this device's rows, one after the other."""
    if k == 1:
        return one(leaves, extras, layouts, batch, rng, 0)
    arrays, structure = jax.tree.flatten(batch)
    rows = [x.reshape(k, x.shape[0] // k, *x.shape[1:]) for x in arrays if jnp.ndim(x)]

    def micro_batch(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        return jax.tree.unflatten(structure, [next(rest) if jnp.ndim(x) else x for x in arrays])

    first = micro_batch([x[0] for x in rows])
    shapes = jax.eval_shape(lambda: one(leaves, extras, layouts, first, rng, 0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    changing = {name: all_gathered(extras[name], layouts[name]) for name in shapes.updates}
    now_whole = {name: all_whole(tree, one.group) for name, tree in changing.items()}
    layouts = {**layouts, **now_whole}
    divided, extras_with = apart(extras, layouts)
    start = _Total(zeros.grads, zeros.loss, zeros.weight, zeros.aux, changing)

    def body(total: _Total, x: Any) -> tuple[_Total, None]:
        # Tied to the counter, or XLA gathers once before the loop and keeps everything whole.
        leaves_now, parts_now, (i, slices) = jax.lax.optimization_barrier((leaves, divided, x))
        now = {**extras_with(parts_now), **total.updates}
        new = one(leaves_now, now, layouts, micro_batch(slices), rng, i)
        add = partial(jax.tree.map, jnp.add)
        return _Total(
            add(total.grads, new.grads),
            total.loss + new.loss,
            total.weight + new.weight,
            add(total.aux, new.aux),
            new.updates,
        ), None

    return jax.lax.scan(body, start, (jnp.arange(k), rows))[0]


def _end_reduction(
    grads: list[jax.Array],
    targets: Sequence[Layout],
    reduced: Sequence[Layout],
    plan: Plan,
    buffer_max_size: int,
) -> list[jax.Array]:
    """Scatters what is still local; sums whole leaves over the data axes, parts over replicas."""
    late = [r if t.dim is None else r.whole() for t, r in zip(targets, reduced, strict=True)]
    grads = scatter_leaves(grads, late, buffer_max_size)
    for axes, of_parts in ((plan.group.axes, False), (plan.group.replica, True)):
        chosen = [i for i, r in enumerate(reduced) if (r.dim is not None) == of_parts]
        sums = reduce_leaves([grads[i] for i in chosen], axes, buffer_max_size)
        for i, total in zip(chosen, sums, strict=True):
            grads[i] = total
    return grads
