"""State dicts of models and optimizers that are not wrapped: the same names and values."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.sharding.mesh import data_group, make_mesh
from gshard.sharding.plan import all_whole
from gshard.wrapped.named_arrays import (
    Named,
    check_optimizer,
    named,
    set_model,
    whole_values,
    write,
)
from gshard.wrapped.wrapped_model import Wrapped
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer


def state_dict(target: Any) -> dict[str, Any]:
    """Whole values by dotted path, as NumPy arrays, of a model or an optimizer, wrapped or not.

    Args:
      target: an NNX module or an `nnx.Optimizer`.

    Returns:
      What `target.state_dict()` returns once it is wrapped, at every level.
    """
    if isinstance(target, (Wrapped, WrappedOptimizer)):
        return target.state_dict()
    return whole_values(_stored(target, "state_dict"))


def set_state_dict(target: Any, values: Any) -> None:
    """Sets a model or an optimizer, wrapped or not, to a state dict of one like it.

    Args:
      target: an NNX module or an `nnx.Optimizer`, changed in place.
      values: what `state_dict` returned, or what `gshard.load` read of it. Names that only one of
        the two has are told of by a warning; for an optimizer they are an error.

    Raises:
      GShardError: for a value of another shape; nothing is changed.
    """
    if isinstance(target, (Wrapped, WrappedOptimizer)):
        target.set_state_dict(values)
        return
    stored = _stored(target, "set_state_dict")
    if isinstance(target, nnx.Module):
        set_model(target, values, stored)
    else:
        check_optimizer(values, stored)
        write(target, values, stored)


def _stored(target: Any, call: str) -> Named:
    if isinstance(target, nnx.Optimizer):
        tree: Any = {
            "step": target.step.get_value(),
            "inner": nnx.as_pure(target.opt_state),
        }
    elif isinstance(target, nnx.Module):
        tree = nnx.as_pure(nnx.state(target))
    elif hasattr(target, call):
        raise GShardError(f"{call}: a {type(target).__name__} has it itself: target.{call}(...).")
    else:
        raise GShardError(
            f"{call}: {shown(target)} is neither a model nor an optimizer of NNX. The variables of "
            "a Linen module are a tree already: gshard.save(variables, path)."
        )
    alone = data_group(make_mesh(devices=jax.devices()[:1]))
    return named((tree, all_whole(tree, alone)))
