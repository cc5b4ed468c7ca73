"""Leaves that are made whole together: most are alone, small ones of a layer share a collective."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard.train.comm.buckets import keep_dimension_order
from gshard.train.comm.collectives import (
    gather,
    gather_across,
    gather_bucket,
    gather_within,
    scatter,
    scatter_bucket,
)
from gshard.train.fsdp.gather_spec import Use
from gshard.train.optim.offload import fetched


class LeafBucket:
    """Leaves made whole at the first use of one of them, and again at its first use backward.

    Their gradients leave together too, when the last of them has arisen.

    Attributes:
      uses: one per leaf. Several differ in nothing but layouts, which are of one group.
      stored: this device's parts, or wholes, at rest.
      taps: what receives the gradients.
      scope: that they are made whole in.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        stored: Sequence[jax.Array],
        taps: Sequence[jax.Array],
        scope: Scope,
    ):
        self.uses, self.stored, self.taps = tuple(uses), list(stored), list(taps)
        self.scope = scope
        if scope.saved:
            scope.holds(self)
        self._kept: list[jax.Array] | None = None
        self._wholes: list[jax.Array] | None = None
        self._to_come_back: set[int] = set()
        self._again: dict[int, jax.Array] = {}

    @property
    def kept(self) -> list[jax.Array]:
        """What is kept of the leaves for the backward pass: parts, or what neighbours hold."""
        result = self._kept
        if result is None:
            result = [_held(use, x) for use, x in zip(self.uses, self.stored, strict=True)]
            self._kept = result
        return result

    @property
    def is_whole(self) -> bool:
        """Whether the forward pass has made them whole."""
        return self._wholes is not None

    def wholes(self) -> list[jax.Array]:
        """The leaves, made whole at the first call."""
        result = self._wholes
        if result is None:
            result = self._wholes = _wholes(self.uses, self.scope, self.kept, self.taps)
        return result

    def wait(self, after: Sequence[jax.Array]) -> None:
        """Not to be gathered before `after` is known."""
        if after and self._kept is None and self.uses[0].stored.dim is not None:
            self.stored, _ = jax.lax.optimization_barrier((self.stored, list(after)))

    def comes_back(self, i: int) -> None:
        """The backward pass will need leaf `i` whole."""
        self._to_come_back.add(i)

    @property
    def is_back(self) -> bool:
        """Whether the backward pass has made whole again what it needs."""
        return self._to_come_back == self._again.keys()

    def again(self, i: int, after: Sequence[jax.Array]) -> jax.Array:
        """Leaf `i`, made whole anew with all that come back, once `after` is known."""
        if not self.is_back:
            places = sorted(self._to_come_back)
            uses = [self.uses[j] for j in places]
            held = bool(uses[0].neighbours)
            saved = [(self.kept if held else self.stored)[j] for j in places]
            # Without an order XLA would find the first gather, and keep what it made.
            saved, _ = jax.lax.optimization_barrier((saved, list(after)))
            if not held:
                saved = fetched(saved, [use.stored for use in uses])
            self._again = dict(zip(places, _gathered(uses, saved), strict=True))
        return self._again[i]

    def end_forward(self) -> None:
        """Lets go of what only the forward pass needs."""
        self.taps, self._wholes = [], None


def _held(use: Use, stored: jax.Array) -> jax.Array:
    part = fetched(stored, use.stored)
    if use.neighbours and not use.held:
        return gather_across(_turned_here(part, use), use.stored, use.neighbours, use.purpose)
    return part


def _turned_here(part: jax.Array, use: Use) -> jax.Array:
    """A collective wants the dimension that it joins first: of a stack, layer by layer."""
    return keep_dimension_order(part, use.stored.group) if use.of_stack and use.stored.dim else part


def _gathered(uses: Sequence[Use], kept: Sequence[jax.Array]) -> list[jax.Array]:
    """Whole leaves, from what is kept of them."""
    first = uses[0]
    if first.stored.dim is None:
        return list(kept)
    if len(uses) > 1:
        return gather_bucket(kept, [use.stored for use in uses], first.purpose)
    if first.neighbours:
        return [gather_within(kept[0], first.stored, first.neighbours, first.purpose)]
    return [gather(_turned_here(kept[0], first), first.stored, first.purpose)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wholes(
    uses: tuple[Use, ...], scope: Scope, kept: list[jax.Array], taps: list[jax.Array]
) -> list[jax.Array]:
    del scope, taps
    return _gathered(uses, kept)


def _forward(
    uses: tuple[Use, ...], scope: Scope, kept: list[jax.Array], taps: list[jax.Array]
) -> tuple[list[jax.Array], None]:
    return _wholes(uses, scope, kept, taps), None


def _backward(
    uses: tuple[Use, ...], scope: Scope, _: None, cotangents: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    # The stored leaves are never differentiated; their cotangents are dead code.
    nothing = [jnp.zeros(u.kept_shape, c.dtype) for u, c in zip(uses, cotangents, strict=True)]
    summed = [
        c.astype(u.reduced.dtype) if u.converts else c
        for u, c in zip(uses, cotangents, strict=True)
    ]
    layouts = [use.reduced for use in uses]
    if layouts[0].dim is None:
        return nothing, summed
    several = len(uses) > 1
    parts = scatter_bucket(summed, layouts) if several else [scatter(summed[0], layouts[0])]
    if scope.saved:
        scope.scattered(parts[0])
    else:  # or XLA on GPU moves it into the next turn of a scan, and holds two layers' gradients
        parts = jax.lax.optimization_barrier(parts)
    return nothing, parts


_wholes.defvjp(_forward, _backward)


class Scope:
    """When the leaves of one scope may be gathered: hardly before they are used.

    Else a compiler that looks far ahead gathers many of them first (GPU: all of an unrolled model).
    A context, left when all derivatives have been taken: rules of JAX keep it beyond its trace.

    Attributes:
      sync: gathered when what a leaf is used with is known; else one gather earlier, beside that
        computation.
      bucket_size: elements of one bucket.
      saved: what its backward pass needs is saved by the forward pass, and not computed again.
      order: inputs of the loss, by their first uses; once it is evaluated.
    """

    def __init__(self, sync: bool, bucket_size: int, saved: bool = True):
        self.sync, self.bucket_size, self.saved = sync, bucket_size, saved
        self.order: list[int] = []
        self._latest: Sequence[jax.Array] = ()
        self._forward: Sequence[jax.Array] = ()
        self._backward: Sequence[jax.Array] = ()
        self._scattered: list[jax.Array] = []
        self._turned: LeafBucket | None = None
        self._held: list[LeafBucket] = []

    def computed_again(self) -> Scope:
        """A scope within, whose backward pass computes again what it needs."""
        return Scope(self.sync, self.bucket_size, saved=False)

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
