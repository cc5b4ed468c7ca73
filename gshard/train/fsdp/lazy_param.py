"""A leaf that a loss needs whole, and that is not whole yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from gshard._util.jaxpr import bind
from gshard.sharding.layout import DEVICE
from gshard.train.fsdp.gather_bucket import LeafBucket, Scope
from gshard.train.fsdp.gather_spec import Use
from gshard.train.optim.offload import fetched


class LazyParam:
    """A leaf that is not whole yet. Made whole once per scope, however often it is used there.

    Attributes:
      bucket: the leaves that are made whole with it; its own number there is `place`.
      of: another leaf, of which this is what `view`, an equation of `VIEWS`, makes; or None.
      used_once: by one equation; where several use it, it stays whole between them, and for their
        derivatives.
    """

    def __init__(self, bucket: LeafBucket, place: int = 0):
        self.bucket, self.place = bucket, place
        self.of: LazyParam | None = None
        self.view: Any = None
        self.used_once = True
        self._in_dtype: LazyParam | None = None

    @classmethod
    def alone(cls, use: Use, stored: jax.Array, tap: jax.Array, scope: Scope) -> LazyParam:
        """A leaf of `scope` that is gathered by itself."""
        return cls(LeafBucket([use], [stored], [tap], scope))

    @property
    def use(self) -> Use:
        """How it becomes whole, and how its gradient leaves."""
        return self.bucket.uses[self.place]

    @property
    def dtype(self) -> Any:
        """The one in which it moves."""
        return self.bucket.stored[self.place].dtype

    @property
    def tap(self) -> jax.Array:
        """Receives its gradient."""
        return self.bucket.taps[self.place]

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass of its use gathers it anew."""
        return self.used_once and bool(self.use.reshard) and self.use.stored.dim is not None

    @property
    def waits(self) -> bool:
        """Whether its gather is ordered; alone and used by several equations it is not."""
        return not self.bucket.is_whole and (self.used_once or len(self.bucket.uses) > 1)

    def whole(self) -> jax.Array:
        """The leaf, made whole."""
        if self.of is None:
            return self.bucket.wholes()[self.place]
        return bind(self.view, [self.of.whole()])[0]

    def regathered(self, after: Sequence[jax.Array]) -> jax.Array:
        """Made whole anew in the backward pass, once `after` is known."""
        if self.of is None:
            return self.bucket.again(self.place, after)
        return bind(self.view, [self.of.regathered(after)])[0]

    def cast(self, dtype: Any) -> LazyParam:
        """The leaf in another dtype, in which it then moves."""
        if self._in_dtype is None or self._in_dtype.dtype != dtype:
            use = dataclasses.replace(self.use, stored=self.use.stored.in_memory(DEVICE))
            stored = fetched(self.bucket.stored[self.place], self.use.stored).astype(dtype)
            tap = self.tap if use.converts else self.tap.astype(dtype)
            self._in_dtype = LazyParam.alone(use, stored, tap, self.bucket.scope)
        return self._in_dtype

    def with_gradient_in(self, dtype: Any) -> LazyParam:
        """The same, whose gradient arrives in `dtype`, the one it moves in, where that is less."""
        if self.use.converts or dtype is None or dtype.itemsize >= self.tap.dtype.itemsize:
            return self
        stored, tap = self.bucket.stored[self.place], self.tap.astype(dtype)
        return LazyParam.alone(self.use, stored, tap, self.bucket.scope)

    def seen(self, view: Any) -> LazyParam:
        """What one equation of `VIEWS` makes of it."""
        leaf = LazyParam(self.bucket, self.place)
        leaf.of, leaf.view, leaf.used_once = self, view, self.used_once
        return leaf

    def given(self, layer: bool) -> tuple[jax.Array, jax.Array]:
        """The arrays that another scope takes; a scan over its layers takes parts."""
        held = self.use.neighbours and not layer
        return (self.bucket.kept if held else self.bucket.stored)[self.place], self.tap

    def elsewhere(self, layer: bool, stored: jax.Array, tap: jax.Array, scope: Scope) -> LazyParam:
        """The same, or one layer of it, in another scope that was given its arrays."""
        use = self.use
        if layer:
            use = use.of_one_layer()
        elif use.neighbours and not use.held:
            use = dataclasses.replace(use, stored=use.stored.in_memory(DEVICE), held=True)
        return LazyParam.alone(use, stored, tap, scope)


def move_together(leaves: Sequence[LazyParam]) -> None:
    """From now on these are made whole by one collective; none is whole yet."""
    uses = [leaf.use for leaf in leaves]
    stored = [leaf.bucket.stored[leaf.place] for leaf in leaves]
    taps = [leaf.tap for leaf in leaves]
    bucket = LeafBucket(uses, stored, taps, leaves[0].bucket.scope)
    for place, leaf in enumerate(leaves):
        leaf.bucket, leaf.place = bucket, place
