"""Losses around the user's: multiplied by a scale, or weighted by whether there is data left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from gshard.train.loss import Weighted


@dataclass(frozen=True)
class Scaled:
    """A loss that is multiplied by the scale of a scaler; its batch is `(batch, scale)`."""

    loss_fn: Callable[..., Any]
    scaler: Any

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """The loss of a batch times its scale."""
        batch, scale = batch
        loss = self.loss_fn(model, batch)
        if isinstance(loss, Weighted):
            return Weighted(loss.sum * scale, loss.weight)
        return loss * scale if hasattr(loss, "dtype") else loss  # what is no loss is refused later


@dataclass(frozen=True)
class Joined:
    """A loss of devices of which some have no data left; its batch is `(batch, shares)`.

    Attributes:
      loss_fn: the loss.
      initial: the mean is over all devices, and not over those that have data.
    """

    loss_fn: Callable[..., Any]
    initial: bool

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """The loss on one device; `shares` is `(rows,)`, all 1 or all 0."""
        batch, shares = batch
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Weighted):
            loss = Weighted(jnp.asarray(loss), jnp.ones(()))
        total = jnp.where(shares[0] > 0, loss.sum, 0)
        return Weighted(total, loss.weight if self.initial else loss.weight * shares[0])
