"""One scope of a loss as it is evaluated: when its leaves may be gathered, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from gshard.train.fsdp.gather_bucket import LeafBucket


class Scope:
    """When the leaves of one scope may be gathered: hardly before they are used.

    Else a compiler that looks far ahead gathers many of them first (GPU: all of an unrolled model).
    A context, left when all derivatives have been taken: rules of JAX keep it beyond its trace.

    Attributes:
      sync: gathered when what a leaf is used with is known; else one gather earlier, beside that
        computation.
      buffer_max_size: elements of one bucket.
      saved: what its backward pass needs is saved by the forward pass, and not computed again.
      order: inputs of the loss, by their first uses; once it is evaluated.
    """

    def __init__(self, sync: bool, buffer_max_size: int, saved: bool = True):
        self.sync, self.buffer_max_size, self.saved = sync, buffer_max_size, saved
        self.order: list[int] = []
        self._latest: Sequence[jax.Array] = ()
        self._forward: Sequence[jax.Array] = ()
        self._backward: Sequence[jax.Array] = ()
        self._scattered: list[jax.Array] = []
        self._turned: LeafBucket | None = None
        self._held: list[LeafBucket] = []

    def computed_again(self) -> Scope:
        """A scope within, whose backward pass computes again what it needs."""
        return Scope(self.sync, self.buffer_max_size, saved=False)

    def used_with(self, operands: Sequence[Any]) -> None:
        """The latest use of leaves, and what they are used with; a mere broadcast has nothing."""
        now = [jax.lax.stop_gradient(x) for x in operands if jnp.ndim(x) and _is_inexact(x)]
        self._latest = now or self._latest

    def forward(self) -> Sequence[jax.Array]:
        """What must be known before leaves are gathered for the latest use."""
        before, self._forward = self._forward, self._latest
        return self._latest if self.sync else before

    def turns(self, bucket: LeafBucket) -> bool:
        """Whether its last use was the last of a forward pass, and so is the first to come back."""
        self._turned = self._turned or bucket
        return self._turned is bucket

    def backward(self, cotangents: Sequence[Any]) -> Sequence[jax.Array]:
        """What must be known before leaves are gathered again for these cotangents."""
        now = [x for x in cotangents if _is_inexact(x)]
        before, self._backward = self._backward, now
        # Gradients that wait to be scattered are whole too: all have left, or all but the latest.
        if self.sync:
            return [*now, *self._scattered[-1:]]
        return [*before, *self._scattered[-2:-1]]

    def scattered(self, part: jax.Array) -> None:
        """Gradients have left; `part` is one of them."""
        self._scattered.append(part)

    def holds(self, bucket: LeafBucket) -> None:
        """Leaves of this scope."""
        self._held.append(bucket)

    def end_forward(self) -> None:
        """Lets go of what only the forward pass needs, and belongs to its trace."""
        self._latest = self._forward = ()
        for bucket in self._held:
            bucket.end_forward()

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        self._backward, self._scattered = (), []
        for bucket in self._held:
            vars(bucket).clear()
        self._held = []


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
