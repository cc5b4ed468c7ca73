"""Tells the kinds of train states apart, Linen and NNX, and makes abstract ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import core
from jax.sharding import NamedSharding
from jax.tree_util import tree_map_with_path

from gshard._util.errors import GShardError, place_of
from gshard._util.pytree import check_array, flatten, path_of
from gshard.train_state.components import Kind
from gshard.train_state.frozen import updated
from gshard.train_state.initial import NotMade
from gshard.train_state.linen import Linen


def kind_of(state: Any) -> Kind:
    """Returns the kind of a train state; refuses what is not one."""
    if isinstance(state, TrainState):
        return Linen()
    if is_nnx_pair(state):
        if isinstance(state[1], _nnx("ModelAndOptimizer")):
            raise GShardError(
                "the optimizer is an nnx.ModelAndOptimizer, whose own model would go stale. Pass "
                "(model, nnx.Optimizer(model, tx, wrt=nnx.Param))."
            )
        from gshard.train_state.nnx import Nnx

        return Nnx(state[1].wrt)
    what, advice = f"a {type(state).__name__}", ""
    if _has_params(state):
        what += f" from {type(state).__module__}"
        advice = (
            " Derive your class from flax.training.train_state.TrainState; or pass (state.params, "
            "state.tx), which starts with a new optimizer state."
        )
    if isinstance(state, (tuple, list)):
        what += f" of ({', '.join(type(item).__name__ for item in state)})"
    raise GShardError(
        f"state is {what}. Pass a flax TrainState, an NNX (model, optimizer) pair with "
        "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param), (params, optax transformation), or a "
        f"function that makes one of these.{advice}"
    )


def as_state(state: Any) -> Any:
    """Converts `(params, tx)` to a `TrainState` without `apply_fn`; returns other states as is.

    `Kind.narrow` makes its optimizer state.
    """
    if (
        isinstance(state, tuple)
        and len(state) == 2
        and is_optimizer(state[1])
        and not (isinstance(state[0], (nn.Module, *_nnx("Module"))) or is_optimizer(state[0]))
    ):
        params, tx = state  # not by create, which fails for a list of NumPy arrays
        trained = updated(params)
        for path, x in zip(*flatten(trained)[:2], strict=True):
            check_array(x, f"the parameter {path}")
        fields: dict[str, Any] = {"apply_fn": None, "opt_state": NotMade()}
        return TrainState(step=0, params=params, tx=tx, **fields)
    return state


def is_optimizer(x: Any) -> bool:
    """Whether this has `init` and `update`, as optax's transformations and `MultiSteps` do."""
    others = (type, nn.Module, *_nnx("Module"))
    return all(callable(getattr(x, name, None)) for name in ("init", "update")) and not isinstance(
        x, others
    )


def is_init(state: Any) -> bool:
    """Whether this is a function that makes a train state, rather than a model or state."""
    others = (type, TrainState, tuple, nn.Module, *_nnx("Module"))
    return callable(state) and not isinstance(state, others) and not _has_params(state)


def _has_params(state: Any) -> bool:
    """Whether this looks like a train state, also one of a class that is not Flax's."""
    return all(hasattr(state, name) for name in ("params", "tx"))


def is_nnx_pair(state: Any) -> bool:
    """Whether this is an NNX `(model, optimizer)` pair."""
    return (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[0], _nnx("Module"))
        and isinstance(state[1], _nnx("Optimizer"))
    )


def _nnx(name: str) -> tuple[type, ...]:
    """A class of NNX for `isinstance`; none before the program imports NNX, which takes a while."""
    found = getattr(sys.modules.get("flax.nnx"), name, None)  # None too while it is imported
    return () if found is None else (found,)


def abstract(init: Callable[..., Any], *args: Any) -> Any:
    """Returns the state that `init(*args)` would make, with abstract arrays."""
    from flax import nnx

    try:
        state = nnx.eval_shape(lambda: as_state(init(*args)))
    except errors.TraceContextError as error:
        raise GShardError(
            f"{place_of(init)} changes an NNX object that was made outside of it, such as an "
            "nnx.Rngs, while gshard traces it. Make the nnx.Rngs and the model inside; for another "
            "seed pass a key in init_args=, and make nnx.Rngs(key) of it."
        ) from error
    if is_nnx_pair(state):
        for path, module in nnx.iter_modules(state[0]):
            for name, x in vars(module).items():
                if isinstance(x, core.Tracer):  # NNX treats it as static
                    raise GShardError(
                        f"The model's attribute {'/'.join(map(str, (*path, name)))} is a bare "
                        "jax.numpy array. gshard traces an init function, and NNX does not see a "
                        "traced array outside a Variable. Write nnx.data(array) or "
                        "nnx.Variable(array), or pass the model and its optimizer themselves."
                    )
    return state


def abstract_like(state: Any) -> Any:
    """Returns the same state with abstract arrays, which keep any `NamedSharding`."""

    def shape(keys: Any, x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        named = sharding if isinstance(sharding, NamedSharding) else None
        try:
            check_array(x, f"{path_of(keys)} of the state")
        except GShardError as error:
            if isinstance(x, jax.Array):  # a deleted one
                raise
            raise GShardError(
                f"{error} A value that is not an array belongs in a field that is declared with "
                "struct.field(pytree_node=False)."
            ) from error
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=named)

    if not is_nnx_pair(state):
        return tree_map_with_path(shape, state)
    from flax import nnx

    def of_variable(x: Any) -> Any:  # NNX treats an abstract array outside a Variable as static
        if isinstance(x, nnx.Variable):
            return tree_map_with_path(shape, x)
        return np.asarray(x, jnp.result_type(x)) if isinstance(x, np.ndarray) else x

    graph, arrays = nnx.split(state)
    return nnx.merge(
        graph, jax.tree.map(of_variable, arrays, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )
