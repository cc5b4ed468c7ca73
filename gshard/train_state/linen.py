"""Converts Linen train states to `Components` and back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes
from flax.training.train_state import TrainState

from gshard._util.errors import GShardError, some
from gshard._util.pytree import path_of
from gshard._util.validation import shown
from gshard.train_state.components import Components, PureLoss
from gshard.train_state.fp8 import (
    OVERWRITTEN,
    check_overwritten,
    join_overwritten,
    overwritten,
    updated,
)
from gshard.train_state.frozen import (
    FROZEN,
    no_change,
    put_back,
    take_out,
    thawed,
    trained_opt_state,
    without_frozen,
)


@dataclass(frozen=True)
class Linen:
    """A Flax `TrainState` or a subclass of it with more fields.

    Attributes:
      frozen: paths of the parameters that are not trained; they become non-trainable state.
    """

    frozen: frozenset[str] = frozenset()
    arguments: ClassVar[tuple[str, ...]] = ("state",)  # of a train step, before the batch

    def freeze(
        self, state: Any, frozen: Any, paths_of: Callable[[Any, Any], frozenset[str]]
    ) -> Linen:
        """Returns the kind of states in which `frozen` and integer parameters are not trained."""
        return Linen(paths_of(updated(state.params), frozen))

    def narrow(self, state: Any) -> Any:
        """Returns the state with an optimizer state of the trained parameters alone."""
        tx = thawed(state.tx, self.frozen)
        if not self.frozen:
            return state
        opt_state = trained_opt_state(tx, self.trained(updated(state.params)), state.opt_state)
        return state.replace(tx=tx, opt_state=opt_state)

    def split(self, state: Any) -> Components:
        """Splits a state into its components."""
        parts = self.split_target(state.params, _extra_fields(state))
        return dataclasses.replace(parts, opt_state=state.opt_state, step=state.step)

    def split_target(self, params: Any, collections: dict[str, Any]) -> Components:
        """Splits the arguments of a loss: parameters and further collections."""
        trained, frozen = take_out(updated(params), self.frozen)
        non_trainable = {**collections, **overwritten(params)}
        return Components(
            trained, None, None, {**non_trainable, FROZEN: frozen} if frozen else non_trainable
        )

    def trained(self, tree: Any) -> Any:
        """Returns the trained part of a tree like the parameters that an optimizer updates."""
        return take_out(tree, self.frozen)[0]

    def full_update(self, updates: Any, params: Any) -> Any:
        """Returns updates of the trained parameters as updates of all of them."""
        return put_back(updates, no_change(take_out(params, self.frozen)[1]))

    def plain_tx(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Wraps an optimizer of the trained parameters for a plain state with all parameters."""
        return without_frozen(tx, self.frozen)

    def is_inference(self, state: Any) -> bool:
        """Whether this is an incomplete state that evaluation accepts; Linen has none."""
        del state
        return False

    def split_inference(self, state: Any) -> Components:
        """Splits a state into the components that evaluation needs, without an optimizer."""
        return dataclasses.replace(self.split(state), opt_state=None)

    def merge(self, parts: Components, like: Any, tx: optax.GradientTransformation) -> Any:
        """Returns a state like `like` with the arrays of `parts` and the optimizer `tx`."""
        fields = {name: x for name, x in parts.non_trainable.items() if name not in PARAMETERS}
        params = _all_params(parts.params, parts.non_trainable)
        return like.replace(
            params=params, opt_state=parts.opt_state, step=parts.step, tx=tx, **fields
        )

    def check(self, state: Any) -> None:
        """Refuses a state that cannot be sharded."""
        if isinstance(state.params, optax.LookaheadParams):
            raise GShardError(
                "the parameters are optax.LookaheadParams, whose slow half has no gradient; a plan "
                "lays out parameters and gradients leaf by leaf. Pass the fast ones, with an "
                "optimizer that keeps the slow ones in its state, where they lie divided: "
                "docs/your-own-loop.md (Lookahead) has its ten lines."
            )
        check_overwritten(state.params)

    def check_step(self, state: Any) -> None:
        """Refuses a state with its own `apply_gradients`, which a train step does not call."""
        if type(state).apply_gradients is not TrainState.apply_gradients:
            raise GShardError(
                f"{type(state).__name__} has an apply_gradients of its own, which make_train_step "
                "would not call. Keep your own jitted step and take the gradient with "
                "gshard.value_and_grad(loss_fn, plan); see docs/your-own-loop.md."
            )

    def update(self, state: Any, parts: Components) -> Any:
        """Returns the state after a step."""
        return self.merge(parts, state, state.tx)

    def call_after(self, fn: Callable[..., Any], state: Any) -> Any:
        """Calls the user's `post_update` and returns the new state."""
        new = fn(state)
        if type(new) is not type(state):
            raise GShardError(
                f"post_update(state) returned {shown(new)}. Return the {type(state).__name__}, "
                "such as state.replace(ema=...)."
            )
        kept = [
            f.name for f in dataclasses.fields(state) if not f.metadata.get("pytree_node", True)
        ]
        changed = [name for name in kept if getattr(new, name) is not getattr(state, name)]
        if changed:
            raise GShardError(
                f"post_update changes {some(changed)}, which is fixed while a step is compiled. "
                "Change arrays only."
            )
        return new

    def absorb(self, params: Any, parts: Components, updates: dict[str, Any]) -> dict[str, Any]:
        """Returns the non-trainable state that the loss changed, which the caller keeps."""
        del params, parts
        return {name: x for name, x in updates.items() if name not in PARAMETERS}

    def params_of(self, parts: Components, template: Any) -> Any:
        """Returns all parameters as the user's own tree."""
        del template
        return _all_params(parts.params, parts.non_trainable)

    def random_paths(self, state: Any) -> frozenset[str]:
        """Returns no paths: random numbers are drawn from keys of `jax.random` only."""
        del state
        return frozenset()

    def tx(self, state: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a state."""
        return state.tx

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        """Returns, by path, the names that Flax's metadata gives the dimensions of parameters."""
        return {path: box.names for path, box in _named_boxes(state)}

    def mesh_names(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Returns, by path, the mesh axes that Flax's metadata gives their dimensions."""
        return {path: _mesh_axes(box) for path, box in _named_boxes(state)}

    def loss(self, loss_fn: Callable[..., Any], mutable: tuple[str, ...], static: Any) -> PureLoss:
        """Converts `loss_fn(params, batch, *, rng, <fields it names>)` to a pure function."""
        del static
        named, needed, takes_any = _keywords(loss_fn)
        if takes_any:
            named |= {"rng", *mutable}

        def pure(params: Any, non_trainable: dict[str, Any], batch: Any, rng: Any) -> Any:
            if rng is not None and "rng" not in named:
                raise GShardError(
                    "rng= was given, and the loss does not take it. Write loss_fn(params, batch, "
                    "*, rng), or leave rng= out."
                )
            available = {
                name: value for name, value in non_trainable.items() if name not in PARAMETERS
            }
            if rng is not None:
                available["rng"] = rng
            missing = needed - set(available)
            if missing:
                raise GShardError(
                    f"the loss takes {some(sorted(missing))}, and there is "
                    f"{some(sorted(available)) or 'nothing'} to give it. A loss is called with "
                    "params, batch, the further fields of the state that it names, and rng where "
                    "one was passed (make_train_step(rng=jax.random.key(0)); evaluation has none)."
                )
            given = {name: value for name, value in available.items() if name in named}
            out = loss_fn(unbox(_all_params(params, non_trainable)), batch, **given)
            return _take_updates(out, mutable) if mutable else (out, {})

        return pure

    def gradients(self, grads: Any, params: Any, updates: dict[str, Any]) -> Any:
        """Returns gradients in the tree of the parameters, `optax.MaskedNode` for a frozen one.

        Gradients that replace their parameter are taken from `updates`.
        """
        structure = jax.tree.structure(self.trained(updated(params)))
        return join_overwritten(jax.tree.unflatten(structure, jax.tree.leaves(grads)), updates)


PARAMETERS = (FROZEN, OVERWRITTEN)  # non-trainable state that is in the user's parameter tree


def _all_params(trained: Any, non_trainable: Mapping[str, Any]) -> Any:
    """Rebuilds the user's parameter tree from the trained and the non-trainable parameters."""
    return join_overwritten(put_back(trained, non_trainable.get(FROZEN, {})), non_trainable)


def unbox(params: Any) -> Any:
    """Removes the boxes of `nn.with_partitioning` from Linen parameters."""
    return jax.tree.map(
        lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x, params, is_leaf=_is_box
    )


def _named_boxes(state: Any) -> list[tuple[str, Any]]:
    """Returns paths and boxes of the parameters whose box names their dimensions."""
    boxes, _ = jax.tree_util.tree_flatten_with_path(updated(state.params), is_leaf=_is_box)
    return [(path_of(keys), box) for keys, box in boxes if hasattr(box, "names")]


def _mesh_axes(box: Any) -> tuple[Any, ...]:
    if isinstance(box, nn.LogicallyPartitioned):  # by its own rules, or those in force here
        return tuple(logical_to_mesh_axes(box.names, box.rules) or ())
    return box.names


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _extra_fields(state: Any) -> dict[str, Any]:
    known = {"params", "opt_state", "step"}
    return {
        f.name: getattr(state, f.name)
        for f in dataclasses.fields(state)
        if f.name not in known and f.metadata.get("pytree_node", True)
    }


def _keywords(loss_fn: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """Returns the keywords a loss takes, those it requires, and whether it takes `**kwargs`."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return set(), set(), False
    named = [p for p in parameters[2:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    named += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return (
        {p.name for p in named},
        {p.name for p in named if p.default is p.empty},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


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
