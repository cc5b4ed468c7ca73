"""`Parts`: what the stages work on, whatever framework the state came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

SCAN_NAMES = ("layers", "layer", "scan")  # what Flax's metadata calls a scanned dimension


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Components:
    """A train state without its framework.

    Attributes:
      params: the trained parameters.
      opt_state: the optimizer's state.
      step: int32 or uint32 scalar.
      extras: everything else that is an array, by name: `batch_stats`, an EMA, rng, ...
      static: hashable structure that the loss needs (an NNX graph definition), or None.
    """

    params: Any
    opt_state: Any
    step: Any
    non_trainable: dict[str, Any] = field(default_factory=dict)
    static: Any = field(default=None, metadata={"static": True})


# `pure(params, extras, batch, rng) -> (loss or (loss, aux), updates)`: updates are the extras that
# the loss changed, by name.
PureLoss = Callable[[Any, dict[str, Any], Any, Any], tuple[Any, dict[str, Any]]]
