"""Train states as components, independent of Flax, which the rest of gshard works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from gshard.train_state.loss_scale import ScalerState
from gshard.train_state.nonfinite import Guard

SCAN_NAMES = ("layers", "layer", "scan")  # what Flax's metadata calls a scanned dimension


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Components:
    """The components of a train state, independent of Flax.

    Attributes:
      params: the trained parameters.
      opt_state: the optimizer's state.
      step: int32 or uint32 scalar.
      non_trainable: all other arrays, by name: `batch_stats`, an EMA, keys, ...
      static: hashable structure that the loss needs (an NNX graph definition), or None.
    """

    params: Any
    opt_state: Any
    step: Any
    non_trainable: dict[str, Any] = field(default_factory=dict)
    static: Any = field(default=None, metadata={"static": True})


class ShardedOptState(NamedTuple):
    """The optimizer state of a sharded train state; `state.opt_state` is one.

    Attributes:
      inner: the user's optimizer state, in the layouts of the plan.
      master: master copies, by path, of the parameters that are computed with in another dtype.
      scaler: the state of the loss scaling.
      guard: counts of steps that were skipped.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0)
      >>> isinstance(state.opt_state, gshard.ShardedOptState)
      True
      >>> state.opt_state.inner[0].mu["w"].shape
      (64, 32)
    """

    inner: Any
    master: dict[str, Any]
    scaler: ScalerState
    guard: Guard

    @classmethod
    def new(cls, inner: Any, master: dict[str, Any]) -> ShardedOptState:
        """Makes the state before the first step."""
        return cls(inner, master, ScalerState.unused(), Guard.new())


# `pure(params, non_trainable, batch, rng) -> (loss or (loss, aux), updates)`: updates are the
# non-trainable arrays that the loss changed, by name.
PureLoss = Callable[[Any, dict[str, Any], Any, Any], tuple[Any, dict[str, Any]]]
