"""A loss that is written for full sequences, evaluated on the slices of one device.

Where the mesh has a sequence axis, this comes before the examples: the loss is traced for full
sequences, and evaluated on the slices of this device as in `evaluator`. The result is a loss of
slices, with collectives over the sequence axis inside, which is then evaluated for the examples of
one device, or called with them.

    loss of full sequences --> loss of slices, with collectives --> its share of this device

The parts of the loss that the devices of the axis return add up to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arrays import at_least_float32
from gshard.sequence.order import Order
from gshard.sequence.view import full_sequences
from gshard.sharding.group import Group
from gshard.sharding.topology import SEQUENCE
from gshard.train.comm.collectives import group_index
from gshard.train.comm.examples import in_zigzag_order
from gshard.train.global_loss.evaluator import GlobalEvaluator
from gshard.train.global_loss.placement import REPLICATED
from gshard.train.global_loss.shares import evaluate_loss, float_of, is_output, share_of
from gshard.train.global_loss.transfers import needed_by
from gshard.train.loss import Reduced, Weighted, has_reduction


class Sequences:
    """Evaluates functions of full sequences on the slices of this device.

    Args:
      group: the data axes.
      dims: the dimension of each array of a batch that is sharded over the sequence axis.
      limit: bytes per device that one operation may all-gather; None for any number.
      of_global_batch: whether the function gets the examples of the whole batch.
      order: which slices a device evaluates: `zigzag` are two, from both ends of a sequence.
    """

    def __init__(
        self,
        group: Group,
        dims: Sequence[int | None],
        limit: int | None,
        of_global_batch: bool,
        order: Order,
    ):
        self.group, self.dims, self.limit = group, dims, limit
        self.batches = group.batch_shards if of_global_batch else 1
        self.zigzag = order == "zigzag"

    @property
    def inner_devices(self) -> int:
        """How many devices add a weight that is taken here: those of axes evaluated before."""
        return 1

    @property
    def is_on(self) -> bool:
        """Whether sequences are sharded at all."""
        return self.group.sequence > 1

    def share(
        self, fun: Callable[..., Any], trained: int, divides: bool, *args: Any
    ) -> tuple[Any, Any]:
        """Returns this device's share of what a `NormalizedLoss`, `fun(*args)`, returns.

        Loss and weight add up over the sequence axis; auxiliary outputs and updates are complete.
        `divides`: whether a quotient of sums is divided here, and not once for the whole batch.
        """
        evaluator, (total, (weight, aux, updates)) = self._values(fun, trained, *args)
        others = self.inner_devices if weight is None else 1
        if weight is None and total.quotient is not None and not divides:
            total, weight = total.quotient
        share = at_least_float32(share_of(evaluator, total))
        if weight is not None:
            weight = float_of(evaluator, weight, others)

        def complete(x: Any) -> Any:
            return jax.tree.map(lambda value: evaluator.convert(value, REPLICATED), x)

        return share, (
            weight,
            *(jax.tree.map(complete, x, is_leaf=is_output) for x in (aux, updates)),
        )

    def complete(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fun(params, non_trainable, batch)` as a function of the slices of a batch.

        Its outputs are complete on each device.
        """
        if not self.is_on:
            return fun

        def of_slices(params: Any, non_trainable: Any, batch: Any) -> Any:
            leaves, structure = jax.tree.flatten((params, non_trainable))

            def of_leaves(leaves: list[Any], batch: Any, _: Any) -> Any:
                return fun(*structure.unflatten(leaves), batch)

            return self._completed(*self._values(of_leaves, 0, leaves, batch, None))

        return of_slices

    def _completed(self, evaluator: GlobalEvaluator, found: Any) -> Any:
        """Returns a tree of complete arrays."""
        return jax.tree.map(lambda value: evaluator.convert(value, REPLICATED), found)

    def _values(
        self, fun: Callable[..., Any], trained: int, params: list[Any], batch: Any, rng: Any
    ) -> tuple[GlobalEvaluator, Any]:
        axes, size = (SEQUENCE,), self.group.sequence
        evaluator = GlobalEvaluator(axes, size, of_examples=False, zigzag=self.zigzag)
        if self.zigzag:
            arrays, structure = jax.tree.flatten(batch)
            with needed_by("sequence_order", ""):
                batch = structure.unflatten(
                    x if dim is None else in_zigzag_order(x, dim, SEQUENCE)
                    for x, dim in zip(arrays, self.dims, strict=True)
                )
        evaluator.limit, evaluator.batches = self.limit, self.batches

        def seen_in_full(*args: Any) -> Any:
            with full_sequences(SEQUENCE):
                return fun(*args)

        outer = 2 if self.zigzag else 1
        given = (self.group, self.dims, outer, trained, params, batch, rng)
        return evaluator, evaluate_loss(evaluator, seen_in_full, *given)


def counted_once(tree: Any, axes: Sequence[str]) -> Any:
    """Sets sums to 0 on all devices of these axes but the first.

    Auxiliary outputs are the same on all of them, and are summed over all devices.
    """
    first = group_index(axes) == 0

    def once(x: Any) -> Any:
        sums = isinstance(x, Weighted) or (isinstance(x, Reduced) and x.by == "sum")
        return jax.tree.map(lambda s: jnp.where(first, s, jnp.zeros_like(s)), x) if sums else x

    return jax.tree.map(once, tree, is_leaf=has_reduction)
