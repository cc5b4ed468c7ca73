"""What may be wrapped: NNX modules, and Linen modules through Flax's own bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.nnx.bridge import variables as bridged

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.wrapped.wrapped_model import Wrapped, refuse_hidden


def as_module(model: Any, call: str) -> nnx.Module:
    """An NNX module, the one given or one that applies a Linen module to its variables.

    Raises:
      GShardError: it is neither; names the call.
    """
    if isinstance(model, nnx.Module):
        refuse_hidden(model)
        return model
    if isinstance(model, nn.Module):
        raise GShardError(
            f"{call}: a Linen module needs its variables: pass (module, module.init(key, inputs))."
        )
    if isinstance(model, (tuple, list)) and len(model) == 2:
        module, variables = model
        if isinstance(module, nn.Module) and isinstance(variables, Mapping):
            made = nnx.bridge.ToNNX(module)
            for name, value in bridged.linen_vars_to_nnx_attrs(variables).items():
                setattr(made, name, nnx.data(value))
            return made
    raise GShardError(
        f"{call}: {shown(model)} is no model. Pass an nnx.Module, or (linen_module, variables)."
    )


def refuse_wrapped(model: Any, call: str) -> None:
    """Raises a `GShardError` when a model is wrapped already."""
    if isinstance(model, Wrapped):
        raise GShardError(
            f"{call}: this model is wrapped already. Wrap the model that it was made of."
        )
