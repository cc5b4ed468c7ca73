"""Loss scaling in Paddle's rhythm: scale, unscale, step, update. Nothing travels to the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard.arguments import shown
from gshard.errors import CallOrderError, GShardError
from gshard.paddle.accumulation import Scaled
from gshard.paddle.wrapped import kept
from gshard.paddle.wrapped_optimizer import WrappedOptimizer
from gshard.scaler import GradScaler, ScalerState


class Scaler:
    """A `GradScaler` with its state, for a wrapped model and its optimizer.

    Attributes:
      settings: the `GradScaler`.
    """

    def __init__(self, settings: GradScaler):
        self.settings = settings
        self._state = jax.tree.map(jnp.asarray, ScalerState.unused())
        self._finite: jax.Array | None = None
        self._stepped = False

    def scale(self, loss_fn: Any) -> Any:
        """A loss function, for `model.backward`, or a number, multiplied by the scale."""
        if not callable(loss_fn):
            return loss_fn * self.loss_scaling if self.settings.enable else loss_fn
        return Scaled(loss_fn, self) if self.settings.enable else loss_fn

    @property
    def loss_scaling(self) -> jax.Array:
        """The scale of the next step; float32 scalar."""
        return self.settings.scale(self._state)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients by the scale, once before a step: to look at them, or to clip."""
        keep = kept(_checked(optimizer, "unscale_"))
        if not self.settings.enable:
            return
        if self._finite is not None:
            raise CallOrderError("unscale_() has already been called since the last update().")
        keep.take()
        if keep.scaler is not self:
            raise GShardError(
                "unscale_: the gradients are not multiplied by this scaler's scale. Take "
                "model.backward(scaler.scale(loss_fn), batch)."
            )
        self._finite = keep.unscale(self.loss_scaling)

    def step(self, optimizer: Any) -> None:
        """Steps the optimizer, unless a gradient is not finite on any device."""
        keep = kept(_checked(optimizer, "step"))
        if not self.settings.enable:
            optimizer.step()
            return
        if self._stepped:
            raise CallOrderError("step() has already been called since the last update().")
        if self._finite is None:
            self.unscale_(optimizer)
        keep.step(self._finite)
        self._stepped = True

    def update(self) -> None:
        """Raises or lowers the scale by what the last step found."""
        if not self.settings.enable:
            return
        if self._finite is None:
            raise CallOrderError("update() was called without a step() or unscale_() before it.")
        self._state = self.settings.after(self._state, self._finite)
        self._finite, self._stepped = None, False

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


def _checked(optimizer: Any, call: str) -> Any:
    if not isinstance(optimizer, WrappedOptimizer):
        raise GShardError(
            f"{call}(optimizer): {shown(optimizer)} is no wrapped optimizer. Pass the one that "
            "group_sharded_parallel returned."
        )
    return optimizer
