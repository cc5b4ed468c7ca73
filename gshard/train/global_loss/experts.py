"""A loss that is written for all experts, evaluated with the experts of one device.

Where parameters are kept on a mesh axis, this comes between the sequences and the examples: the
loss is traced with the full parameters, and evaluated with this device's part of them, and of the
examples, as in `evaluator`. Tokens are sent to the devices of their experts and back by
all-to-alls, as the products of the loss need it. The result is a loss with collectives over that
axis inside.

    loss of all experts --> loss of this device's experts, with collectives --> its share
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard.sharding.group import Group
from gshard.train.global_loss.evaluator import GlobalEvaluator
from gshard.train.global_loss.placement import REPLICATED, Placement, sharded
from gshard.train.global_loss.sequences import Sequences
from gshard.train.global_loss.shares import evaluate_loss, is_output
from gshard.train.loss import Reduced


class Experts(Sequences):
    """Evaluates functions of all experts with those of this device.

    Args:
      group: the data axes.
      kept: the dimension of each parameter that is sharded over the axis.
      limit: bytes per device that one operation may all-gather; None for any number.

    Attributes:
      own: after a call of what `complete` returned, which of its outputs have one entry for each
        example, of which this device has its own.
    """

    def __init__(self, group: Group, kept: Sequence[int | None], limit: int | None):
        super().__init__(group, (), limit, of_global_batch=True, order="contiguous")
        self.kept, self.own = list(kept), list[bool]()
        self.batches = group.batch_shards // group.experts

    @property
    def inner_devices(self) -> int:
        """Those of the sequence axis."""
        return self.group.sequence

    @property
    def is_on(self) -> bool:
        """Whether any parameter is kept."""
        return bool(self.group.kept)

    def _completed(self, evaluator: GlobalEvaluator, found: Any) -> Any:
        """Returns a tree of arrays, complete but for those with one entry for each example."""
        leaves, tree = jax.tree.flatten(found, is_leaf=is_output)
        at = [getattr(x.value if isinstance(x, Reduced) else x, "placement", None) for x in leaves]
        self.own = [place == sharded(0) for place in at]

        def converted(x: Any, place: Placement) -> Any:
            return jax.tree.map(lambda value: evaluator.convert(value, place), x)

        pairs = zip(leaves, self.own, strict=True)
        return tree.unflatten(converted(x, sharded(0) if own else REPLICATED) for x, own in pairs)

    def _values(
        self, fun: Callable[..., Any], trained: int, params: list[Any], batch: Any, rng: Any
    ) -> tuple[GlobalEvaluator, Any]:
        evaluator = GlobalEvaluator((self.group.kept,), self.group.experts)
        evaluator.limit, evaluator.batches, evaluator.exchanges = self.limit, self.batches, True
        evaluator.other_axes, evaluator.platform = self.group.outer_axes, self.group.platform
        evaluator.partition = replace(evaluator.partition, shared=True)
        dims = [0 if jnp.ndim(x) else None for x in jax.tree.leaves(batch)]
        given = (self.group, dims, 1, trained, params, batch, rng, self.kept)
        return evaluator, evaluate_loss(evaluator, fun, *given)


def kept_dims(layouts: Any) -> list[int | None]:
    """Returns the dimension of each array of a tree that is sharded over the axis it is kept on."""
    return [None if x.kept is None else x.kept.dim for x in jax.tree.leaves(layouts)]


def refuse_per_device(group: Group, is_global: bool) -> None:
    """Refuses a loss of each device's own examples, whose tokens go to experts of other devices."""
    if group.kept and not is_global:
        raise GShardError(
            "loss_semantics='per_device': a device has some of the experts, kept on the axis "
            f"{group.kept!r}, and computes them for the examples of other devices. Use "
            "loss_semantics='global', which computes what one device would, or shard without keep=."
        )
