"""How one leaf becomes whole where a loss needs it, and how its gradient leaves.

The gradient of a leaf arrives at its *tap*, a second input of zeros that nothing reads: shaped like
the part, it receives the gradient scattered where it arises; shaped like the whole, the local one.
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
class Use:
    """How a leaf becomes whole, and how its gradient leaves.

    Attributes:
      stored: the layout at rest; gathered when it is divided.
      reduced: the layout of the gradient at the tap; scattered when it is divided.
      purpose: what the gather is counted as.
      converts: the gradient is scattered in the dtype of `reduced`; else in the one it arises in.
      reshard: nothing whole is kept for the backward pass, which gathers again; a number: what so
        many neighbours hold between them is kept, and gathered among them. False: the whole leaf.
      held: the leaf is given as what neighbours hold between them.
      layer: of the model, as `buckets.layers` names it; small leaves of one layer move together.
      of_stack: it is one layer of a stack, in the body of a scan.
    """

    stored: Layout
    reduced: Layout
    purpose: str = "gather"
    converts: bool = False
    reshard: bool | int = True
    held: bool = False
    layer: str = ""
    of_stack: bool = False

    @property
    def pointless(self) -> bool:
        """Nothing to gather and nothing to scatter."""
        return self.stored.dim is None and self.reduced.dim is None

    @property
    def scannable(self) -> bool:
        """A scan over dimension 0 can take the leaf divided."""
        others = self.stored.model_axes and self.stored.model_axes[0]
        return self.stored.dim != 0 and self.reduced.dim != 0 and not others

    @property
    def moved(self) -> Layout:
        """The layout by which it moves: gathered, or else scattered."""
        return self.reduced if self.stored.dim is None else self.stored

    @property
    def kind(self) -> tuple[Any, ...]:
        """What leaves must have in common to move together, their dtype aside."""
        groups = [None if x.dim is None else x.group for x in (self.stored, self.reduced)]
        return self.purpose, *groups, self.converts and self.reduced.dtype, bool(self.reshard)

    def of_one_layer(self) -> Use:
        """The use of one layer of a stack, in the body of a scan: all there is one layer."""
        stored, reduced = self.stored.layer(), self.reduced.layer()
        return dataclasses.replace(self, stored=stored, reduced=reduced, layer="", of_stack=True)

    def tap(self) -> jax.Array:
        """Zeros that receive the gradient."""
        return jnp.zeros(self.reduced.shard_shape, self.reduced.dtype)

    @property
    def neighbours(self) -> int:
        """How many keep the leaf between them for the backward pass; 0 where parts are kept."""
        return 0 if isinstance(self.reshard, bool) or self.stored.dim is None else self.reshard

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the array that the leaf is made whole from."""
        times = self.stored.group.size // (self.neighbours or self.stored.group.size)
        return tuple(
            size * times if d == self.stored.dim else size
            for d, size in enumerate(self.stored.shard_shape)
        )


def uses_of(
    stored: Sequence[Layout],
    reduced: Sequence[Layout],
    purpose: str = "gather",
    converts: bool = False,
    reshard: bool | int = True,
) -> list[Use | None]:
    """The uses of all leaves of one tree, arguments as in `Use`; None for a pointless one."""
    names = layer_names([layout.path for layout in stored])
    uses = [
        Use(s, r, purpose, converts, s.dim is None or reshard, layer=layer)
        for s, r, layer in zip(stored, reduced, names, strict=True)
    ]
    return [None if use.pointless else use for use in uses]
