"""The kinds of train states, Linen and NNX, and the functions that tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.train_state.components import Components, PureLoss
from gshard.train_state.fp8 import updated
from gshard.train_state.linen import Linen
from gshard.train_state.nnx import Nnx


class Kind(Protocol):
    """What the rest of gshard asks of a train state; `Linen` and `Nnx` implement it.

    Attributes:
      arguments: names of the arguments of a train step that come before the batch.
    """

    arguments: ClassVar[tuple[str, ...]]

    def freeze(
        self, state: Any, frozen: Any, paths_of: Callable[[Any, Any], frozenset[str]]
    ) -> Kind:
        """Returns the kind of states in which `frozen` and integer parameters are not trained."""
        ...

    def narrow(self, state: Any) -> Any:
        """Returns the state with an optimizer state of the trained parameters alone."""
        ...

    def split(self, state: Any) -> Components:
        """Splits a state into its components."""
        ...

    def split_target(self, params: Any, collections: dict[str, Any], /) -> Components:
        """Splits the arguments of a loss: parameters, or a model, and further collections."""
        ...

    def split_inference(self, state: Any, /) -> Components:
        """Splits a state into the components that evaluation needs, without an optimizer."""
        ...

    def merge(self, parts: Components, like: Any, tx: optax.GradientTransformation) -> Any:
        """Returns a state like `like` with these components and the optimizer `tx`."""
        ...

    def update(self, state: Any, parts: Components) -> Any:
        """Returns the state after a step, or None where it was updated in place."""
        ...

    def trained(self, tree: Any) -> Any:
        """Returns the trained part of a tree like the parameters."""
        ...

    def full_update(self, updates: Any, params: Any) -> Any:
        """Returns updates of the trained parameters as updates of all of them."""
        ...

    def params_of(self, parts: Components, template: Any) -> Any:
        """Returns all parameters as the user's own tree."""
        ...

    def tx(self, state: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a state."""
        ...

    def plain_tx(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns the optimizer of the trained parameters as that of a plain state."""
        ...

    def is_inference(self, state: Any) -> bool:
        """Whether this is an incomplete state that evaluation accepts."""
        ...

    def check(self, state: Any) -> None:
        """Raises a GShardError for a state that cannot be sharded."""
        ...

    def check_step(self, state: Any) -> None:
        """Raises a GShardError for a state with an `apply_gradients` of its own."""
        ...

    def loss(self, loss_fn: Callable[..., Any], mutable: tuple[str, ...], static: Any) -> PureLoss:
        """Returns the user's loss as a pure function of components."""
        ...

    def gradients(self, grads: Any, params: Any, updates: dict[str, Any], /) -> Any:
        """Returns gradients as the user's optimizer takes them."""
        ...

    def absorb(self, params: Any, parts: Components, updates: dict[str, Any], /) -> dict[str, Any]:
        """Returns what the loss changed, or writes it into the user's model."""
        ...

    def call_after(self, fn: Callable[..., Any], state: Any) -> Any:
        """Calls the user's `post_update` and returns the new state."""
        ...

    def random_paths(self, state: Any) -> frozenset[str]:
        """Returns the paths of non-trainable state that random numbers are drawn from."""
        ...

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        """Returns, by path, the names that Flax's metadata gives the dimensions of parameters."""
        ...

    def mesh_names(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Returns, by path, the mesh axes that Flax's metadata gives their dimensions."""
        ...


def kind_of(state: Any) -> Kind:
    """Returns the kind of a train state.

    Raises:
      GShardError: gshard does not know this kind of state.
    """
    if isinstance(state, TrainState):
        return Linen()
    if is_nnx_pair(state):
        if isinstance(state[1], nnx.ModelAndOptimizer):
            raise GShardError(
                "the optimizer is an nnx.ModelAndOptimizer, whose own model would go stale. Pass "
                "(model, nnx.Optimizer(model, tx, wrt=nnx.Param))."
            )
        return Nnx(state[1].wrt)
    what = f"a {type(state).__name__}"
    if isinstance(state, (tuple, list)):
        what += f" of ({', '.join(type(item).__name__ for item in state)})"
    raise GShardError(
        f"state is {what}. Pass a flax TrainState, an NNX (model, optimizer) pair with "
        "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param), (params, optax transformation), or a "
        "function that makes one of these."
    )


def as_state(state: Any) -> Any:
    """Converts `(params, tx)` to a `TrainState` without `apply_fn`; returns other states as is."""
    if (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[1], optax.GradientTransformation)
        and not isinstance(state[0], (nn.Module, nnx.Module, optax.GradientTransformation))
    ):
        params, tx = state  # not by create, which fails for a list of NumPy arrays
        trained = updated(params)
        nowhere = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(trained))
        opt_state = jax.eval_shape(tx.init, trained) if nowhere else tx.init(trained)
        fields: dict[str, Any] = {"apply_fn": None, "opt_state": opt_state}
        return TrainState(step=0, params=params, tx=tx, **fields)
    return state


def is_init(state: Any) -> bool:
    """Whether this is a function that makes a train state, rather than a callable model."""
    others = (type, TrainState, tuple, nn.Module, nnx.Module)
    return callable(state) and not isinstance(state, others)


def is_nnx_pair(state: Any) -> bool:
    """Whether this is an NNX `(model, optimizer)` pair."""
    return (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[0], nnx.Module)
        and isinstance(state[1], nnx.Optimizer)
    )


def abstract(init: Callable[..., Any], *args: Any) -> Any:
    """Returns the state that `init(*args)` would make, with abstract arrays."""
    return nnx.eval_shape(lambda: as_state(init(*args)))


def abstract_like(state: Any) -> Any:
    """Returns the same state with abstract arrays, which keep any `NamedSharding`."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=_named(x))
        except (TypeError, ValueError) as error:
            raise GShardError(
                f"the state holds {shown(x)} where an array is expected. Take it out, or mark its "
                "field with struct.field(pytree_node=False)."
            ) from error

    def of_variable(x: Any) -> Any:  # NNX treats an abstract array outside a Variable as static
        return jax.tree.map(shape, x) if isinstance(x, nnx.Variable) else x

    if not is_nnx_pair(state):
        return jax.tree.map(shape, state)
    graph, arrays = nnx.split(state)
    return nnx.merge(
        graph, jax.tree.map(of_variable, arrays, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def _named(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
