"""What a loss function of `backward` wraps, and the models that it reads from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gshard._util.closure import read_from_outside
from gshard._util.errors import GShardError, some, warn
from gshard.train.loss import Weighted


@dataclass(frozen=True)
class Scaled:
    """A loss multiplied by the scale of a scaler; its batch is `(batch, scale)`."""

    loss_fn: Callable[..., Any]
    scaler: Any

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """Returns the loss of a batch times its scale."""
        batch, scale = batch
        loss = self.loss_fn(model, batch)
        if isinstance(loss, Weighted):
            return Weighted(loss.sum * scale, loss.weight)
        return loss * scale if hasattr(loss, "dtype") else loss  # others are refused later


@dataclass(frozen=True)
class Joined:
    """A loss for devices of which some have no data left; its batch is `(batch, shares)`.

    Attributes:
      loss_fn: the loss.
      initial: whether the mean is over all devices, and not only over those that have data.
    """

    loss_fn: Callable[..., Any]
    initial: bool

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """Returns the loss on one device; `shares` has one entry per example, all 1 or all 0."""
        batch, shares = batch
        has_data = shares[0] > 0
        loss = self.loss_fn(model, jax.tree.map(partial(_finite, has_data), batch))
        if not isinstance(loss, Weighted):
            if not hasattr(loss, "dtype"):
                return loss  # refused later
            loss = Weighted(loss, jnp.ones(()))
        total = jnp.where(has_data, loss.sum, 0)
        return Weighted(total, loss.weight if self.initial else jnp.where(has_data, loss.weight, 0))


def _finite(has_data: jax.Array, x: jax.Array) -> jax.Array:
    """On a device without data, zeros for NaN and infinities: a weight of 0 times NaN is NaN."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(has_data | jnp.isfinite(x), x, 0)


def check_closure(loss_fn: Any, model: nnx.Module) -> None:
    """Warns of models that a loss reads from outside: once compiled, it sees their first values.

    If it is the wrapped model itself, in the closure, this raises a `GShardError`: there it would
    have no gradient. Of a method's object and in a partial it may be there for something else.
    """
    closure, found = (
        {k: get() for k, get in x.items()} for x in read_from_outside(own_loss(loss_fn))
    )
    own = [name for name, x in closure.items() if x is model]
    if own:
        raise GShardError(
            f"backward: the loss reads the model as {own[0]}, from outside, and not as its first "
            "argument: it would have no gradient. Use the model that the loss is called with."
        )
    if read := [name for name, x in (closure | found).items() if _has_arrays(x)]:
        warn(
            f"backward: the loss reads {some(read)} from outside. The current values are compiled "
            "in. If they will change, make them a part of the wrapped model that is not trained: "
            "nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, nnx.PathContains('student'))), or "
            "with a ZeroRedundancyOptimizer model.grads['teacher'] = None before each step(): see "
            '"What a loss reads from outside" on the page "Losses" of the documentation.'
        )


def own_loss(loss_fn: Any) -> Any:
    """The user's function, as given."""
    while isinstance(loss_fn, (Scaled, Joined)):
        loss_fn = loss_fn.loss_fn
    return loss_fn


def _has_arrays(x: Any) -> bool:
    return isinstance(x, nnx.Module) and bool(jax.tree.leaves(nnx.state(x)))
