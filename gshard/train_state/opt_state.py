"""The optimizer state of a sharded train state."""

from __future__ import annotations

from typing import Any, NamedTuple

from gshard.train_state.loss_scale import ScalerState
from gshard.train_state.nonfinite import Guard


class ShardedOptState(NamedTuple):
    """State of the plan-aware optimizer.

    Attributes:
      inner: the user's optimizer state, in the layouts of the plan.
      master: master copies of parameters that are computed with in another dtype, by path.
      scaler: of the loss.
      guard: counts of steps that were skipped.
    """

    inner: Any
    master: dict[str, Any]
    scaler: ScalerState
    guard: Guard

    @classmethod
    def new(cls, inner: Any, master: dict[str, Any]) -> ShardedOptState:
        """Of a fresh state."""
        return cls(inner, master, ScalerState.unused(), Guard.new())
