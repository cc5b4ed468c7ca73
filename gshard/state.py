"""The only file that knows Flax: every kind of train state as `Parts`, and back.

`Parts` is what the stages work on. A *kind* (`Linen` or `Nnx`) splits a state into parts, merges
parts into a state, and turns the user's loss into one pure function of whole parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.training.train_state import TrainState

from gshard.errors import GShardError, some, warn
from gshard.tree import flatten

SCAN_NAMES = ("layers", "layer", "scan")  # what Flax's metadata calls a scanned dimension


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
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
    extras: dict[str, Any] = field(default_factory=dict)
    static: Any = field(default=None, metadata={"static": True})


# `pure(params, extras, batch, rng) -> (loss or (loss, aux), updates)`: updates are the extras that
# the loss changed, by name.
PureLoss = Callable[[Any, dict[str, Any], Any, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Linen:
    """A Flax `TrainState` or a subclass of it with more fields."""

    def split(self, state: Any) -> Parts:
        """The parts of a state."""
        return Parts(state.params, state.opt_state, state.step, _extra_fields(state))

    arguments: ClassVar = ("state",)  # of a train step, before the batch

    def split_target(self, params: Any, collections: dict[str, Any]) -> Parts:
        """Parts for a loss alone: parameters and further collections."""
        return Parts(params, None, None, collections)

    def split_inference(self, state: Any) -> Parts:
        """Parts for evaluation: no optimizer."""
        return dataclasses.replace(self.split(state), opt_state=None)

    def merge(self, parts: Parts, like: Any, tx: optax.GradientTransformation) -> Any:
        """A state like `like` with the arrays of `parts` and the optimizer `tx`."""
        return like.replace(
            params=parts.params, opt_state=parts.opt_state, step=parts.step, tx=tx, **parts.extras
        )

    def update(self, state: Any, parts: Parts) -> Any:
        """The state after a step."""
        return self.merge(parts, state, state.tx)

    def absorb(self, params: Any, parts: Parts, updates: dict[str, Any]) -> dict[str, Any]:
        """What the loss changed, for the caller to keep."""
        del params, parts
        return updates

    def params_like(self, params: Any, template: Any) -> Any:
        """Whole parameters as the user's own tree."""
        del template
        return params

    def tx(self, state: Any) -> optax.GradientTransformation:
        """The optimizer of a state."""
        return state.tx

    def scan_names(self, state: Any) -> list[tuple[str | None, ...] | None]:
        """Per parameter leaf the names that Flax's metadata gives its dimensions, if any."""
        boxes = jax.tree.leaves(state.params, is_leaf=_is_box)
        return [getattr(box, "names", None) for box in boxes]

    def loss(self, loss_fn: Callable[..., Any], mutable: tuple[str, ...], static: Any) -> PureLoss:
        """`loss_fn(params, batch, *, rng, <extras it names>)` as a pure function."""
        del static
        named = _keywords(loss_fn)

        def pure(params: Any, extras: dict[str, Any], batch: Any, rng: Any) -> Any:
            given = {name: value for name, value in extras.items() if name in named}
            if rng is not None and "rng" in named:
                given["rng"] = rng
            out = loss_fn(unbox(params), batch, **given)
            return _take_updates(out, mutable) if mutable else (out, {})

        return pure

    def gradients(self, grads: Any, params: Any) -> Any:
        """Gradients in the containers of the parameters."""
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads))


@dataclass(frozen=True)
class _NnxStatic:
    """What turns the extras of an NNX model, which are kept by path, into its state again."""

    graph: Any
    structure: Any
    paths: tuple[str, ...]

    def rest(self, extras: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self.structure, [extras[path] for path in self.paths])


@dataclass(frozen=True)
class Nnx:
    """An NNX `(model, optimizer)` pair; `wrt` is the optimizer's filter for what it trains."""

    wrt: Any
    arguments: ClassVar = ("model", "optimizer")  # of a train step, before the batch

    def split(self, state: Any) -> Parts:
        """The parts of a pair."""
        model, optimizer = state
        parts = self.split_model(model)
        return dataclasses.replace(
            parts, opt_state=nnx.as_pure(optimizer.opt_state), step=optimizer.step.get_value()
        )

    def split_model(self, model: nnx.Module) -> Parts:
        """The model alone, without an optimizer."""
        graph, params, rest = nnx.split(model, self.wrt, ...)
        paths, leaves, structure = flatten(rest)
        extras = dict(zip(paths, leaves, strict=True))
        static = _NnxStatic(graph, structure, tuple(paths))
        return Parts(nnx.as_pure(params), None, None, extras, static)

    def split_target(self, model: nnx.Module, collections: dict[str, Any]) -> Parts:
        """Parts for a loss alone."""
        if collections:
            raise GShardError(
                f"{some(collections)}: an NNX model keeps its own state. Call it with (model, "
                "batch)."
            )
        if not isinstance(model, nnx.Module):
            raise GShardError(
                f"the plan was made for an NNX model; got a {type(model).__name__}. Call it with "
                "(model, batch)."
            )
        return self.split_model(model)

    def split_inference(self, model: nnx.Module | tuple[Any, Any]) -> Parts:
        """Parts for evaluation: no optimizer."""
        return self.split_model(model[0] if isinstance(model, tuple) else model)

    def merge(self, parts: Parts, like: Any, tx: optax.GradientTransformation) -> Any:
        """A new model and optimizer like the given pair, with the arrays of `parts` and `tx`."""
        model, optimizer = like
        graph, params, _ = nnx.split(model, self.wrt, ...)
        params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(parts.params))
        model = nnx.merge(graph, params, parts.static.rest(parts.extras), copy=True)
        optimizer = nnx.clone(optimizer)
        optimizer.tx = tx
        optimizer.step = nnx.OptState(parts.step)
        optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, parts.opt_state))
        return model, optimizer

    def update(self, state: Any, parts: Parts) -> None:
        """Writes the arrays of `parts` into the user's model and optimizer, in place."""
        model, optimizer = state
        nnx.update(model, parts.params)
        nnx.update(model, parts.static.rest(parts.extras))
        nnx.update(optimizer.opt_state, nnx.state(parts.opt_state))
        optimizer.step.set_value(parts.step)

    def absorb(self, model: nnx.Module, parts: Parts, updates: dict[str, Any]) -> dict[str, Any]:
        """Writes what the loss changed into the model."""
        nnx.update(model, parts.static.rest({**parts.extras, **updates}))
        return {}

    def params_like(self, params: Any, template: Any) -> Any:
        """Whole parameters as an `nnx.State` of Variables."""
        return self.gradients(params, template[0])

    def tx(self, state: Any) -> optax.GradientTransformation:
        """The optimizer of a state."""
        return state[1].tx

    def scan_names(self, state: Any) -> list[tuple[str | None, ...] | None]:
        """Per parameter leaf the names that Flax's metadata gives its dimensions, if any."""
        variables = jax.tree.leaves(
            nnx.state(state[0], self.wrt), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        data = [variable.get_metadata() for variable in variables]
        return [d.get("out_sharding") or d.get("sharding_names") for d in data]

    def loss(self, loss_fn: Callable[..., Any], mutable: tuple[str, ...], static: Any) -> PureLoss:
        """`loss_fn(model, batch)` as a pure function; what it changes in the model comes back."""
        if mutable:
            raise GShardError(
                f"mutable={mutable!r} is for Linen: an NNX model keeps its own state. Leave it out."
            )

        def pure(params: Any, extras: dict[str, Any], batch: Any, rng: Any) -> Any:
            del rng
            model = nnx.merge(static.graph, params, static.rest(extras), copy=True)
            out = loss_fn(model, batch)
            _, params_after, rest = nnx.split(model, self.wrt, ...)
            _warn_of_overwritten(params, params_after)
            after = dict(zip(*flatten(rest)[:2], strict=True))
            if set(after) != set(extras):
                raise GShardError(
                    "the loss adds or removes Variables of the model: "
                    f"{some(set(after) ^ set(extras))}. Make them before shard_train_state."
                )
            return out, {path: x for path, x in after.items() if x is not extras[path]}

        return pure

    def gradients(self, grads: Any, model: nnx.Module) -> Any:
        """Gradients as the `nnx.State` of Variables that `optimizer.update` takes."""
        structure = jax.tree.structure(nnx.state(model, self.wrt))
        return jax.tree.unflatten(structure, jax.tree.leaves(grads))


Kind = Linen | Nnx


def kind_of(state: Any) -> Kind:
    """The kind of a train state.

    Raises:
      GShardError: when it is none that gshard knows.
    """
    if isinstance(state, TrainState):
        return Linen()
    if is_nnx_pair(state):
        return Nnx(state[1].wrt)
    raise GShardError(
        f"state is a {type(state).__name__}. Pass a flax TrainState, an NNX (model, optimizer) "
        "pair, (params, optax transformation), or a function that makes one of these."
    )


def as_state(state: Any) -> Any:
    """`(params, tx)` as a `TrainState` without `apply_fn`; other states as they are."""
    if (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[1], optax.GradientTransformation)
    ):
        return TrainState.create(apply_fn=None, params=state[0], tx=state[1])
    return state


def is_init(state: Any) -> bool:
    """Whether this is a function that makes a train state: models can be called too."""
    return callable(state) and not isinstance(state, (TrainState, tuple, nn.Module, nnx.Module))


def is_nnx_pair(state: Any) -> bool:
    """Whether this is an NNX `(model, optimizer)`."""
    return (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[0], nnx.Module)
        and isinstance(state[1], nnx.Optimizer)
    )


def abstract(init: Callable[..., Any], *args: Any) -> Any:
    """The state that `init(*args)` would make, its arrays abstract."""
    return nnx.eval_shape(lambda: as_state(init(*args)))


def abstract_like(state: Any) -> Any:
    """The same state with abstract arrays."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

    def of_variable(x: Any) -> Any:  # NNX takes an abstract array outside a Variable for static
        return jax.tree.map(shape, x) if isinstance(x, nnx.Variable) else x

    if not is_nnx_pair(state):
        return jax.tree.map(shape, state)
    graph, arrays = nnx.split(state)
    return nnx.merge(
        graph, jax.tree.map(of_variable, arrays, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def unbox(params: Any) -> Any:
    """Linen parameters without the boxes of `nn.with_partitioning`."""
    return jax.tree.map(
        lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x, params, is_leaf=_is_box
    )


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _extra_fields(state: Any) -> dict[str, Any]:
    known = {"params", "opt_state", "step"}
    return {
        f.name: getattr(state, f.name)
        for f in dataclasses.fields(state)
        if f.name not in known and f.metadata.get("pytree_node", True)
    }


def _warn_of_overwritten(before: Any, after: Any) -> None:
    """Parameters change by their gradient alone; what a loss writes into one is not kept."""
    paths, old, _ = flatten(before)
    written = [p for p, x, y in zip(paths, old, jax.tree.leaves(after), strict=True) if x is not y]
    if written:
        warn(
            f"the loss writes into the parameters {some(written)}; what it writes is used for this "
            "loss and not kept."
        )


def _keywords(loss_fn: Callable[..., Any]) -> set[str]:
    """The names that a function takes beyond its first two arguments."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _take_updates(out: Any, mutable: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Splits `(loss, updates)` or `(loss, (aux, updates))`."""
    loss, updates = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if isinstance(updates, tuple) and len(updates) == 2:
        loss, updates = (loss, updates[0]), updates[1]
    if not isinstance(updates, Mapping) or not set(mutable) <= set(updates):
        raise GShardError(
            f"with mutable={mutable!r} the loss returns (loss, updates), or (loss, (aux, updates)) "
            f"with has_aux=True, where updates has the keys {some(mutable)}; it returned "
            f"{jax.tree.map(jnp.shape, out)}."
        )
    return loss, {name: updates[name] for name in mutable}
