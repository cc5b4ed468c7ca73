"""What the rest of gshard sees of a train state: its components, and its kind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import optax

from gshard._util.errors import GShardError, MissingAttributeError
from gshard.train_state.nonfinite import Guard, ScalerState

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
    scaler: ScalerState = ScalerState()
    guard: Guard = Guard()

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The hyperparameters of `optax.inject_hyperparams`, by name: the dictionary of its state.

        Raises:
          AttributeError: none of the optimizers has it, or several have.
        """
        is_leaf = lambda x: isinstance(getattr(x, "hyperparams", None), dict)  # noqa: E731
        found = [x.hyperparams for x in jax.tree.leaves(self.inner, is_leaf=is_leaf) if is_leaf(x)]
        if len(found) != 1:
            raise AttributeError(
                "state.opt_state.hyperparams needs one optax.inject_hyperparams in the optimizer, "
                f"and there are {len(found)}. state.opt_state.inner is the optimizer's own state."
            )
        return found[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "hyperparams":  # Python calls this for the property's AttributeError too
            return ShardedOptState.hyperparams.__get__(self)
        raise MissingAttributeError(
            f"state.opt_state.{name}: state.opt_state is gshard's, with the optimizer's own state "
            f"in it. Read state.opt_state.inner.{name}."
        )

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple.__getitem__(self, key)
        raise GShardError(
            f"state.opt_state[{key}]: state.opt_state is gshard's, with the optimizer's own state "
            f"in it. Read state.opt_state.inner[{key}]; hyperparameters are in "
            "state.opt_state.hyperparams."
        )


# `pure(params, non_trainable, batch, rng) -> (loss or (loss, aux), updates)`: updates are the
# non-trainable arrays that the loss changed, by name.
PureLoss = Callable[[Any, dict[str, Any], Any, Any], tuple[Any, dict[str, Any]]]


class Kind(Protocol):
    """What the rest of gshard asks of a train state; `Linen` and `Nnx` implement it.

    Attributes:
      arguments: names of the arguments of a train step that come before the batch.
      counts_draws: whether keys in the state draw other numbers at every step by themselves.
    """

    arguments: ClassVar[tuple[str, ...]]
    counts_draws: ClassVar[bool] = False

    def freeze(
        self, state: Any, frozen: Any, paths_of: Callable[[Any, Any], frozenset[str]]
    ) -> Kind:
        """Returns the kind of states in which `frozen` and integer parameters are not trained."""
        ...

    def narrow(self, state: Any) -> Any:
        """Returns the state with an optimizer state of the trained parameters alone."""
        return state

    def split(self, state: Any) -> Components:
        """Splits a state into its components."""
        ...

    def split_target(self, target: Any, collections: dict[str, Any], /) -> Components:
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
        return tree

    def full_update(self, updates: Any, params: Any) -> Any:
        """Returns updates of the trained parameters as updates of all of them."""
        del params
        return updates

    def with_frozen(self, trained: Any, params: Any) -> Any:
        """Returns the trained parameters together with the frozen ones of `params`."""
        del params
        return trained

    def untrained(self, state: Any) -> Collection[str]:
        """Returns the names of non-trainable state that are parameters, though not trained."""
        ...

    def params_of(self, parts: Components, template: Any) -> Any:
        """Returns all parameters as the user's own tree."""
        ...

    def tx(self, state: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a state."""
        ...

    def plain(self, state: Any) -> Any:
        """Returns a state as one of the user's own classes."""
        return state

    def plain_tx(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns the optimizer of the trained parameters as that of a plain state."""
        return tx

    def is_inference(self, state: Any) -> bool:
        """Whether this is an incomplete state that evaluation accepts."""
        del state
        return False

    def check(self, state: Any) -> None:
        """Raises a GShardError for a state that cannot be sharded."""

    def trains_the_same(self, state: Any) -> bool:
        """Whether the optimizer of a state trains what it did when the plan was made."""
        del state
        return True

    def check_step(self, state: Any, loss_fn: Callable[..., Any], rng: Any) -> None:
        """Raises a GShardError for a state whose own update `make_train_step` would not call.

        It warns of a loss that would be without random numbers, since `rng` is None.
        """

    def loss(
        self,
        loss_fn: Callable[..., Any],
        mutable: tuple[str, ...],
        static: Any,
        by_name: Collection[str] = (),
        what: str = "the loss",
    ) -> PureLoss:
        """Returns the user's loss as a pure function of components.

        `by_name` are the fields that the caller passes by name: the loss must take each of them.
        `what` is its name in messages.
        """
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
        del state
        return frozenset()

    def dropouts(self, parts: Components) -> list[str]:
        """Returns the paths of the modules that drop entries, since they are in train mode."""
        del parts
        return []

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        """Returns, by path, the names that Flax's metadata gives the dimensions of parameters."""
        ...

    def mesh_names(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Returns, by path, the mesh axes that Flax's metadata gives their dimensions."""
        return self.scan_names(state)
