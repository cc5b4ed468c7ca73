"""Loss scaling for float16, inside the compiled step: no value is copied to the host.

Source: mixed precision training (Micikevicius et al., 2018), section 3.2; parameters, defaults and
dynamics are those of Paddle's `GradScaler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, flag, shown

_COUNTS = {"incr_count": "good", "decr_count": "bad"}


class ScalerState(NamedTuple):
    """The state of a `GradScaler`, kept in the train state.

    Attributes:
      scale: float32 scalar, the current loss scale; 0 before the first step.
      good: int32 scalar, number of finite steps since the scale last changed.
      bad: int32 scalar, number of non-finite steps in a row.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0)
      >>> isinstance(state.opt_state.scaler, gshard.ScalerState)
      True
    """

    scale: Any
    good: Any
    bad: Any

    @classmethod
    def unused(cls) -> ScalerState:
        """Makes the state before the first step."""
        return cls(np.float32(0), np.int32(0), np.int32(0))


@dataclass(frozen=True)
class GradScaler:
    """Settings of loss scaling, which keeps small float16 gradients from becoming 0.

    Pass it as `scaler=` of `make_train_step`. A step whose gradient is not finite on any device
    changes nothing but the scale, which it lowers.

    Args:
      enable: False turns loss scaling off.
      init_loss_scaling: the scale at the first step.
      incr_ratio: factor above 1 by which the scale grows after `incr_every_n_steps` finite steps.
      decr_ratio: factor below 1 by which the scale shrinks after `decr_every_n_nan_or_inf`
        non-finite steps in a row. The scale does not fall below 1.
      incr_every_n_steps: number of finite steps in a row, 1 or more.
      decr_every_n_nan_or_inf: number of non-finite steps in a row, 1 or more.
      use_dynamic_loss_scaling: False keeps the scale at `init_loss_scaling`.

    Raises:
      GShardError: an argument is out of range.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0)
      >>> step = gshard.make_train_step(loss_fn, plan, scaler=gshard.GradScaler())
      >>> state, metrics = step(state, gshard.shard_batch(batch, plan))
      >>> float(metrics["loss_scale"])
      65536.0
    """

    enable: bool = True
    init_loss_scaling: float = 2.0**16
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    use_dynamic_loss_scaling: bool = True

    def __post_init__(self) -> None:
        for name, fits, meaning in (
            ("init_loss_scaling", lambda x: 0 < x < np.inf, "a positive number"),
            ("incr_ratio", lambda x: 1 < x < np.inf, "a number above 1"),
            ("decr_ratio", lambda x: 0 < x < 1, "a number between 0 and 1"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
                raise GShardError(f"{name}={shown(value)} must be {meaning}.")
        for name in ("enable", "use_dynamic_loss_scaling"):
            flag(name, getattr(self, name))
        for name in ("incr_every_n_steps", "decr_every_n_nan_or_inf"):
            check_integer(name, getattr(self, name), 1)

    def scale(self, state: ScalerState) -> jax.Array:
        """Returns the scale of the next step, a float32 scalar."""
        if not isinstance(state, ScalerState):
            raise GShardError(
                f"GradScaler.scale({shown(state)}): a gshard.GradScaler is only the settings. In "
                "Paddle's rhythm use the scaler that group_sharded_parallel returned; "
                "make_train_step(scaler=) scales by itself."
            )
        first = jnp.float32(self.init_loss_scaling)
        kept = jnp.asarray(state.scale)
        return jnp.where(kept > 0, kept, first) if self.use_dynamic_loss_scaling else first

    def after(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        """Returns the state after a step, given whether its gradient was finite."""
        scale = self.scale(state)
        if not self.use_dynamic_loss_scaling:
            return state._replace(scale=scale)
        good = jnp.where(finite, state.good + 1, 0)
        bad = jnp.where(finite, 0, state.bad + 1)
        grows, shrinks = good >= self.incr_every_n_steps, bad >= self.decr_every_n_nan_or_inf
        grown = scale * self.incr_ratio
        scale = jnp.where(grows & jnp.isfinite(grown), grown, scale)
        least = jnp.minimum(scale, 1.0)  # Paddle's floor
        scale = jnp.where(shrinks, jnp.maximum(scale * self.decr_ratio, least), scale)
        return ScalerState(scale, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad))

    def state_dict(self, state: ScalerState) -> dict[str, Any]:
        """Returns settings and counts by Paddle's names; empty when not enabled.

        Args:
          state: `state.opt_state.scaler` of a sharded train state; for NNX of its optimizer.
        """
        if not self.enable:
            return {}
        names = ("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")
        return {
            "scale": float(self.scale(state)),
            **{name: getattr(self, name) for name in names},
            **{name: int(jnp.asarray(getattr(state, f))) for name, f in _COUNTS.items()},
            "use_dynamic_loss_scaling": self.use_dynamic_loss_scaling,
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> tuple[GradScaler, ScalerState]:
        """Restores a scaler and its state from what `state_dict` returned.

        Raises:
          GShardError: keys are missing or unknown.
        """
        if not isinstance(saved, Mapping):
            raise GShardError(
                f"{shown(saved)} is not what GradScaler.state_dict returned. Pass that mapping."
            )
        known = {*cls().state_dict(ScalerState.unused())}
        if not saved:
            return cls(enable=False), ScalerState.unused()
        if set(saved) != known:
            raise GShardError(
                f"the state of a GradScaler has the keys {sorted(known)}; got {sorted(saved)}."
            )
        settings = {k: v for k, v in saved.items() if k != "scale" and k not in _COUNTS}
        scaler = cls(init_loss_scaling=saved["scale"], **settings)
        counts = {field: jnp.int32(saved[name]) for name, field in _COUNTS.items()}
        return scaler, ScalerState(jnp.float32(saved["scale"]), **counts)
