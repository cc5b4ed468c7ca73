"""How one parameter is all-gathered for the forward pass and its gradient reduce-scattered.

The gradient of a parameter arrives at its *gradient sink*, a second input of zeros that nothing
reads. A sink shaped like the shard receives the reduce-scattered gradient, one shaped like the full
parameter receives the local gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gshard.sharding.layout import Layout
from gshard.train.comm.buckets import layer_names


@dataclass(frozen=True)
class GatherSpec:
    """How a parameter is all-gathered, and how its gradient is reduce-scattered.

    Attributes:
      stored: layout of the stored parameter, which is all-gathered when it is sharded.
      reduced: layout of the gradient at its sink, reduce-scattered when it is sharded.
      purpose: the purpose that a budget counts the all-gather under.
      converts: the gradient is reduce-scattered in the dtype of `reduced`; else in its own.
      reshard: the full parameter is not kept for the backward pass, which gathers it again. A
        number: a sub-group of that many devices keeps the parameter sharded among them, and
        re-gathers it from them. False: the full parameter is kept.
      from_subgroup: the parameter is given as the shard that a sub-group keeps.
      layer: layer of the model, as named by `buckets.layer_names`; small parameters of one layer
        share a bucket.
      of_stack: this is one layer of a stack, in the body of a scan.
    """

    stored: Layout
    reduced: Layout
    purpose: str = "gather"
    converts: bool = False
    reshard: bool | int = True
    from_subgroup: bool = False
    layer: str = ""
    of_stack: bool = False

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to gather and nothing to reduce-scatter."""
        return self.stored.dim is None and self.reduced.dim is None

    @property
    def scannable(self) -> bool:
        """Whether a scan over dimension 0 can take the parameter sharded."""
        others = self.stored.model_axes and self.stored.model_axes[0]
        return self.stored.dim != 0 and self.reduced.dim != 0 and not others

    @property
    def sharded_layout(self) -> Layout:
        """The layout that is all-gathered, or the one that is reduce-scattered if none is."""
        return self.reduced if self.stored.dim is None else self.stored

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """What parameters of one bucket have in common, besides their dtype."""
        groups = [None if x.dim is None else x.group for x in (self.stored, self.reduced)]
        return self.purpose, *groups, self.converts and self.reduced.dtype, bool(self.reshard)

    def of_one_layer(self) -> GatherSpec:
        """Returns the spec of one layer of a stack, in the body of a scan."""
        stored, reduced = self.stored.layer(), self.reduced.layer()
        return dataclasses.replace(self, stored=stored, reduced=reduced, layer="", of_stack=True)

    def grad_sink(self) -> jax.Array:
        """Makes the zeros that receive the gradient."""
        return jnp.zeros(self.reduced.shard_shape, self.reduced.dtype)

    @property
    def subgroup_size(self) -> int:
        """Devices that keep the parameter among them for the backward pass; 0: the shard group."""
        return 0 if isinstance(self.reshard, bool) or self.stored.dim is None else self.reshard

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the array kept for the backward pass, before its all-gather."""
        times = self.stored.group.size // (self.subgroup_size or self.stored.group.size)
        return tuple(
            size * times if d == self.stored.dim else size
            for d, size in enumerate(self.stored.shard_shape)
        )


def gather_specs(
    stored: Sequence[Layout],
    reduced: Sequence[Layout],
    purpose: str = "gather",
    converts: bool = False,
    reshard: bool | int = True,
) -> list[GatherSpec | None]:
    """Returns the specs of all leaves of one tree, None for a leaf that is not communicated.

    The arguments are those of `GatherSpec`, with one layout for each leaf.
    """
    names = layer_names([layout.path for layout in stored])
    specs = [
        GatherSpec(s, r, purpose, converts, s.dim is None or reshard, layer=layer)
        for s, r, layer in zip(stored, reduced, names, strict=True)
    ]
    return [None if spec.is_local else spec for spec in specs]
