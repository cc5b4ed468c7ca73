"""Loss scaling for float16, in the compiled step: no value travels to the host.

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
    """What a `GradScaler` keeps in the train state.

    Attributes:
      scale: float32 scalar; 0 before the first step.
      good: int32 scalar, good steps since the last change.
      bad: int32 scalar, bad steps in a row.
    """

    scale: Any
    good: Any
    bad: Any

    @classmethod
    def unused(cls) -> ScalerState:
        """Of a state that no scaler has seen."""
        return cls(np.float32(0), np.int32(0), np.int32(0))


@dataclass(frozen=True)
class GradScaler:
    """Multiplies the loss so that small float16 gradients do not vanish; pass it as `scaler=`.

    A step whose gradient is not finite on any device changes nothing and lowers the scale.

    Attributes:
      enable: False makes it do nothing.
      init_loss_scaling: the first scale, of a state that no scaler has seen.
      incr_ratio: above 1, what the scale is multiplied by after `incr_every_n_steps` good steps.
      decr_ratio: below 1, after `decr_every_n_nan_or_inf` bad steps in a row; not below a scale
        of 1.
      use_dynamic_loss_scaling: False is `init_loss_scaling` at every step.
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
        """The scale of the next step, float32."""
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
        """The state after a step whose gradient was finite, or was not."""
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
        """Parameters and counts by Paddle's names; empty when not enabled.

        Args:
          state: `state.opt_state.scaler` of a divided train state; NNX: of the optimizer.
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
        """The scaler and its state that `state_dict` described.

        Raises:
          GShardError: keys are missing or unknown.
        """
        if not isinstance(saved, Mapping):
            raise GShardError(f"{shown(saved)} is not what GradScaler.state_dict returned.")
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
