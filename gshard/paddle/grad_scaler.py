"""Loss scaling with Paddle's calls: scale, unscale, step, update. No data goes to the host."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import CallOrderError, GShardError, MissingAttributeError
from gshard._util.validation import shown
from gshard.distributed.agree import spans_processes
from gshard.sharding.plan import Plan
from gshard.train_state.nonfinite import GradScaler, ScalerState
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.loss_fns import Scaled
from gshard.wrapped.same_hyperparameters import SameHyperparameters
from gshard.wrapped.wrapped_model import kept
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer


class Scaler:
    """A `GradScaler`, its `settings`, with its state, for wrapped models and their optimizers.

    All models are on the same `devices`, by their ids, where its state is.
    """

    def __init__(self, settings: GradScaler, devices: list[int]):
        self.settings, self.devices = settings, devices
        self._state = jax.tree.map(jnp.asarray, ScalerState())
        self._found: list[jax.Array] = []  # since the last update, of every optimizer: finite
        self._stepped: list[Accumulation] = []
        self._is_compared = False  # with the settings and the state of the other processes

    def __getattr__(self, name: str) -> Any:
        verb, _, setting = name.partition("_")
        if verb not in ("get", "set") or setting not in GradScaler.__dataclass_fields__:
            return object.__getattribute__(self, name)  # raises what Python says
        fix = f"It is scaler.settings.{setting}. The scale of the next step is scaler.loss_scaling."
        if verb == "set":
            fix = f"Pass {setting}= to gshard.paddle.GradScaler, or change and load a state_dict()."
        raise MissingAttributeError(f"a scaler has no {name}. {fix}")

    def scale(self, loss_fn: Any) -> Any:
        """Multiplies a loss function, for `model.backward`, or a number by the scale."""
        if not self.settings.enable:
            return loss_fn
        return Scaled(loss_fn, self) if callable(loss_fn) else loss_fn * self.loss_scaling

    @property
    def loss_scaling(self) -> jax.Array:
        """Returns the scale of the next step, a float32 scalar."""
        return self.settings.scale(self._state)

    def compare(self, plan: Plan) -> None:
        """Compares settings and state over the processes, once after the user has set them.

        Raises:
          GShardError: they differ, on all processes.
        """
        if not self._is_compared and spans_processes(plan):
            lines = [f"{name}={value}" for name, value in self.state_dict().items()]
            fix = "Make it with the same settings, or load the same state, on all processes."
            SameHyperparameters("GradScaler", fix).add(plan, lines)
        self._is_compared = True

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients by the scale, once before a step, to examine or clip them."""
        keep = kept_by(optimizer, "unscale_")
        if not self.settings.enable:
            return
        if keep.finite is not None:
            raise CallOrderError(
                "unscale_() has already been called for these gradients. Call it once before each "
                "step(optimizer)."
            )
        keep.take()
        if keep.scaler is not self:
            raise GShardError(
                "unscale_: the gradients are not multiplied by this scaler's scale. Call "
                "model.backward(scaler.scale(loss_fn), batch)."
            )
        self._found.append(keep.unscale())

    def step(self, optimizer: Any) -> None:
        """Steps the optimizer, unless a gradient is not finite on any device."""
        keep = kept_by(optimizer, "step")
        if not self.settings.enable:
            optimizer.step()
            return
        if keep in self._stepped:
            raise CallOrderError(
                "step() has already been called since the last update(). Call update() after each "
                "step of the optimizer."
            )
        if keep.finite is None:
            self.unscale_(optimizer)
        keep.step(keep.finite)
        self._stepped.append(keep)

    def update(self) -> None:
        """Raises or lowers the scale, depending on the gradients since the last call."""
        if not self.settings.enable:
            return
        if not self._found:
            raise CallOrderError(
                "update() was called without a step() or unscale_() before it. Call "
                "step(optimizer) first."
            )
        finite = functools.reduce(jnp.logical_and, self._found)
        self._state = self.settings.after(self._state, finite)
        self._found, self._stepped = [], []

    def minimize(self, optimizer: Any, loss: Any = None) -> None:
        """Calls `step` and `update`; the loss is ignored."""
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
        """Continues as the scaler that returned this `state_dict`."""
        if not self.settings.enable:
            return
        if not state_dict:
            raise CallOrderError(
                f"load_state_dict({shown(state_dict)}): the state is from a scaler that is not "
                "enabled, but this one is enabled."
            )
        self.settings, self._state = GradScaler.from_state_dict(state_dict)
        self._is_compared = False

    set_state_dict = load_state_dict


def kept_by(optimizer: Any, call: str) -> Accumulation:
    """Returns the gradients of a wrapped optimizer, or raises a `GShardError`."""
    if not isinstance(optimizer, WrappedOptimizer):
        raise GShardError(
            f"{call}: {shown(optimizer)} is not a wrapped optimizer. Pass the one that "
            "group_sharded_parallel returned."
        )
    return kept(optimizer)
