"""A leaf that a loss needs whole: how it becomes so, when, and how its gradient leaves.

The gradient of a leaf arrives at its *tap*, a second input of zeros that nothing reads: shaped like
the part, it receives the gradient scattered where it arises; shaped like the whole, the local one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard.collectives import gather, gather_across, gather_within, scatter
from gshard.equations import bind
from gshard.layout import DEVICE, Layout


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
    """

    stored: Layout
    reduced: Layout
    purpose: str = "gather"
    converts: bool = False
    reshard: bool | int = True
    held: bool = False

    @property
    def pointless(self) -> bool:
        """Nothing to gather and nothing to scatter."""
        return self.stored.dim is None and self.reduced.dim is None

    @property
    def scannable(self) -> bool:
        """A scan over dimension 0 can take the leaf divided."""
        others = self.stored.user and self.stored.user[0]
        return self.stored.dim != 0 and self.reduced.dim != 0 and not others

    def layer(self) -> Use:
        """The use of one layer of a stack."""
        return dataclasses.replace(self, stored=self.stored.layer(), reduced=self.reduced.layer())

    def tap(self) -> jax.Array:
        """Zeros that receive the gradient."""
        return jnp.zeros(self.reduced.part_shape, self.reduced.dtype)

    @property
    def neighbours(self) -> int:
        """How many keep the leaf between them for the backward pass; 0 where parts are kept."""
        return 0 if isinstance(self.reshard, bool) or self.stored.dim is None else self.reshard

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of what `gathered` takes."""
        times = self.stored.group.size // (self.neighbours or self.stored.group.size)
        return tuple(
            size * times if d == self.stored.dim else size
            for d, size in enumerate(self.stored.part_shape)
        )

    def gathered(self, kept: jax.Array) -> jax.Array:
        """The whole leaf, from its part or from what neighbours hold between them."""
        if self.neighbours:
            return gather_within(kept, self.stored, self.neighbours, self.purpose)
        return gather(kept, self.stored, self.purpose)


class Order:
    """When the leaves of one scope may be gathered: hardly before they are used.

    Else a compiler that looks far ahead gathers many of them first (GPU: all of an unrolled model).

    `sync`: when what a leaf is used with is known; else one use earlier, beside that computation.
    A context, left when all derivatives have been taken: rules of JAX keep it beyond its trace.
    """

    def __init__(self, sync: bool):
        self.sync = sync
        self._forward: Sequence[jax.Array] = ()
        self._backward: Sequence[jax.Array] = ()
        self._scattered: list[jax.Array] = []
        self._turned = False
        self._leaves: list[Divided] = []

    def forward(self, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """What must be known before a leaf is gathered that is used with `operands`."""
        now = [jax.lax.stop_gradient(x) for x in operands if jnp.ndim(x) and _is_inexact(x)]
        before, self._forward = self._forward, now
        return now if self.sync else before

    def turn(self) -> bool:
        """Whether this is the first call: the backward pass of the last use of a whole leaf."""
        turned, self._turned = self._turned, True
        return not turned

    def backward(self, cotangents: Sequence[Any]) -> Sequence[jax.Array]:
        """The same for the backward pass of that use."""
        now = [x for x in cotangents if _is_inexact(x)]
        before, self._backward = self._backward, now
        # Gradients that wait to be scattered are whole too: all have left, or all but the latest.
        if self.sync:
            return [*now, *self._scattered[-1:]]
        return [*before, *self._scattered[-2:-1]]

    def holds(self, leaf: Divided) -> None:
        """A leaf of this scope."""
        self._leaves.append(leaf)

    def end_forward(self) -> None:
        """Lets go of what only the forward pass needs, and belongs to its trace."""
        self._forward = ()
        for leaf in self._leaves:
            leaf.tap = leaf._result = None

    def __enter__(self) -> Order:
        return self

    def __exit__(self, *_: object) -> None:
        self._backward, self._scattered = (), []
        for leaf in self._leaves:
            vars(leaf).clear()
        self._leaves = []

    def scattered(self, part: jax.Array) -> None:
        """A gradient has left."""
        self._scattered.append(part)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(use: Use, order: Order | None, kept: jax.Array, tap: jax.Array) -> jax.Array:
    del order, tap
    return use.gathered(kept)


def _whole_forward(
    use: Use, order: Order | None, kept: jax.Array, tap: jax.Array
) -> tuple[jax.Array, None]:
    return _whole(use, order, kept, tap), None


def _whole_backward(
    use: Use, order: Order | None, _: None, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # The stored leaf is never differentiated; its cotangent is dead code.
    nothing = jnp.zeros(use.kept_shape, cotangent.dtype)
    summed = cotangent.astype(use.reduced.dtype) if use.converts else cotangent
    part = scatter(summed, use.reduced)
    if order is not None and use.reduced.dim is not None:
        order.scattered(part)
    return nothing, part


_whole.defvjp(_whole_forward, _whole_backward)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class Divided:
    """A leaf that is not whole yet. Made whole once per scope, however often it is used there.

    `of` and `view`: another one, of which this is what an equation of `VIEWS` makes. `used_once`:
    by one equation; where several use it, it stays whole between them, and for their derivatives.
    """

    def __init__(
        self,
        use: Use,
        stored: jax.Array,
        tap: Any,
        of: Divided | None = None,
        view: Any = None,
    ):
        self.use, self.stored, self.tap, self.of, self.view = use, stored, tap, of, view
        self.used_once = of is None or of.used_once
        self.order: Order | None = None
        self._kept: jax.Array | None = None
        self._result: jax.Array | None = None

    @property
    def kept(self) -> jax.Array:
        """What neighbours hold of it for the backward pass; its part where that is kept."""
        result = self._kept
        if result is None:
            result = self._fetched(self.stored)
            if self.use.neighbours and not self.use.held:
                use = self.use
                result = gather_across(result, use.stored, use.neighbours, use.purpose)
            self._kept = result
        return result

    def whole(self) -> jax.Array:
        """The leaf, made whole at the first call."""
        result: Any = self._result
        if result is None:
            if self.of is None:
                result = _whole(self.use, self.order, self.kept, self.tap)
            else:
                (result,) = bind(self.view, [self.of.whole()])
            self._result = result
        return result

    def wait(self, after: Sequence[jax.Array], order: Order | None) -> None:
        """Not to be gathered before `after` is known; `order`: of its backward pass."""
        if order is not None:
            order.holds(self)
        if self.of is not None:
            self.of.wait(after, order)
            return
        self.order = order
        if after and self.use.stored.dim is not None and self._kept is None:
            self.stored, _ = jax.lax.optimization_barrier((self.stored, list(after)))

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass of its use gathers it anew."""
        return self.used_once and bool(self.use.reshard) and self.use.stored.dim is not None

    def whole_again(self, after: Sequence[jax.Array]) -> jax.Array:
        """Made whole anew in the backward pass, once `after` is known."""
        if self.of is not None:
            return bind(self.view, [self.of.whole_again(after)])[0]
        # Without an order XLA would find the first gather, and keep what it made.
        saved = self.kept if self.use.neighbours else self.stored
        saved, _ = jax.lax.optimization_barrier((saved, list(after)))
        return self.use.gathered(saved if self.use.neighbours else self._fetched(saved))

    def cast(self, dtype: Any) -> Divided:
        """The leaf in another dtype, in which it then moves."""
        tap = self.tap if self.use.converts else self.tap.astype(dtype)
        use = dataclasses.replace(self.use, stored=self.use.stored.at(DEVICE))
        return Divided(use, self._fetched(self.stored).astype(dtype), tap)

    def seen(self, view: Any) -> Divided:
        """What one equation of `VIEWS` makes of it."""
        return Divided(self.use, self.stored, self.tap, self, view)

    def given(self, layer: bool) -> tuple[jax.Array, jax.Array]:
        """The arrays that another scope takes; a scan over its layers takes parts."""
        return self.stored if layer or not self.use.neighbours else self.kept, self.tap

    def elsewhere(self, layer: bool, stored: jax.Array, tap: jax.Array) -> Divided:
        """The same, or one layer of it, in a scope that was given its arrays."""
        if layer:
            return Divided(self.use.layer(), stored, tap)
        use = self.use
        if use.neighbours and not use.held:
            use = dataclasses.replace(use, stored=use.stored.at(DEVICE), held=True)
        return Divided(use, stored, tap)

    def _fetched(self, x: jax.Array) -> jax.Array:
        """`stored`, on the device."""
        return jax.device_put(x, jax.memory.Space.Device) if self.use.stored.on_host else x
