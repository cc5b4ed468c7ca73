"""Parameters that their gradient replaces: Flax's `_overwrite_with_gradient`, fp8 statistics.

A model with fp8 layers has `params = {"params": ..., "_overwrite_with_gradient": ...}`. Flax's
`TrainState` gives its optimizer the first alone, and puts the gradient of the second in its place:
layers return new statistics as the gradient of the old ones (`flax.linen.fp8_ops`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten

OVERWRITTEN = "overwritten parameters"  # their key in `non_trainable`; no field can have this name


def updated(params: Any) -> Any:
    """Returns the parameters that an optimizer updates.

    Raises:
      GShardError: there are collections that Flax's `TrainState` would drop.
    """
    if not _has_overwritten(params):
        return params
    if set(params) != {"params", OVERWRITE_WITH_GRADIENT}:
        raise GShardError(
            f"the parameters have {OVERWRITE_WITH_GRADIENT!r} and {some(sorted(params))}. Flax's "
            "TrainState takes {'params': ..., '_overwrite_with_gradient': ...} and no more: keep "
            "other collections in fields of their own."
        )
    return params["params"]


def overwritten(params: Any) -> dict[str, Any]:
    """Returns the parameters that their gradient replaces, as non-trainable state."""
    if not _has_overwritten(params):
        return {}
    return {OVERWRITTEN: {OVERWRITE_WITH_GRADIENT: params[OVERWRITE_WITH_GRADIENT]}}


def join_overwritten(params: Any, non_trainable: Mapping[str, Any]) -> Any:
    """The inverse of `updated` and `overwritten`."""
    return (
        {"params": params, **non_trainable[OVERWRITTEN]} if OVERWRITTEN in non_trainable else params
    )


def check_overwritten(params: Any) -> None:
    """Refuses parameters that cannot be replaced by their gradient, since they have none."""
    updated(params)
    for path, x in zip(*flatten(overwritten(params).get(OVERWRITTEN, {}))[:2], strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise GShardError(
                f"{path} has dtype {x.dtype}: only a floating parameter has a gradient that could "
                "replace it."
            )


def _has_overwritten(params: Any) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params
