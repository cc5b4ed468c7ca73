"""Loss scaling with Paddle's calls: scale, unscale, step, update. No data goes to the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import CallOrderError, GShardError
from gshard._util.validation import shown
from gshard.train_state.nonfinite import GradScaler, ScalerState
from gshard.wrapped.accumulation import Accumulation, Scaled
from gshard.wrapped.wrapped_model import kept
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer


class Scaler:
    """A `GradScaler` with its state, for wrapped models and their optimizers.

    Attributes:
      settings: the `GradScaler`.
    """

    def __init__(self, settings: GradScaler):
        self.settings = settings
        self._state = jax.tree.map(jnp.asarray, ScalerState())
        self._found: list[jax.Array] = []  # since the last update, of every optimizer: finite
        self._stepped: list[Accumulation] = []

    def scale(self, loss_fn: Any) -> Any:
        """Multiplies a loss function, for `model.backward`, or a number by the scale."""
        if not callable(loss_fn):
            return loss_fn * self.loss_scaling if self.settings.enable else loss_fn
        return Scaled(loss_fn, self) if self.settings.enable else loss_fn

    @property
    def loss_scaling(self) -> jax.Array:
        """Returns the scale of the next step, a float32 scalar."""
        return self.settings.scale(self._state)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients by the scale, once before a step, to examine or clip them."""
        keep = _kept(optimizer, "unscale_")
        if not self.settings.enable:
            return
        if keep.finite is not None:
            raise CallOrderError("unscale_() has already been called for these gradients.")
        keep.take()
        if keep.scaler is not self:
            raise GShardError(
                "unscale_: the gradients are not multiplied by this scaler's scale. Take "
                "model.backward(scaler.scale(loss_fn), batch)."
            )
        self._found.append(keep.unscale(self.loss_scaling))

    def step(self, optimizer: Any) -> None:
        """Steps the optimizer, unless a gradient is not finite on any device."""
        keep = _kept(optimizer, "step")
        if not self.settings.enable:
            optimizer.step()
            return
        if keep in self._stepped:
            raise CallOrderError("step() has already been called since the last update().")
        if keep.finite is None:
            self.unscale_(optimizer)
        keep.step(keep.finite)
        self._stepped.append(keep)

    def update(self) -> None:
        """Raises or lowers the scale, depending on the gradients since the last call."""
        if not self.settings.enable:
            return
        if not self._found:
            raise CallOrderError("update() was called without a step() or unscale_() before it.")
        finite = self._found[0]
        for other in self._found[1:]:
            finite = finite & other
        self._state = self.settings.after(self._state, finite)
        self._found, self._stepped = [], []

    def minimize(self, optimizer: Any, loss: Any = None) -> None:
        """`step` and `update`; the loss, which `backward` has returned, is not needed."""
        del loss
        self.step(optimizer)
        self.update()

    def is_enable(self) -> bool:
        """Whether it scales."""
        return self.settings.enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale changes."""
        return self.settings.use_dynamic_loss_scaling

    def state_dict(self) -> dict[str, Any]:
        """Settings and counts by Paddle's names; empty when not enabled."""
        return self.settings.state_dict(self._state)

    def load_state_dict(self, state_dict: Any) -> None:
        """Goes on as the scaler whose `state_dict` this is."""
        if not state_dict and self.settings.enable:
            raise CallOrderError(
                f"load_state_dict({shown(state_dict)}): that of a scaler that is not enabled, and "
                "this one is."
            )
        if self.settings.enable:
            self.settings, self._state = GradScaler.from_state_dict(state_dict)

    set_state_dict = load_state_dict


def _kept(optimizer: Any, call: str) -> Accumulation:
    if not isinstance(optimizer, WrappedOptimizer):
        raise GShardError(
            f"{call}(optimizer): {shown(optimizer)} is no wrapped optimizer. Pass the one that "
            "group_sharded_parallel returned."
        )
    return kept(optimizer)
