"""Converts Linen train states to `Components` and back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from gshard._util.closure import opened
from gshard._util.errors import GShardError, did_you_mean, place_of, some, warn
from gshard._util.pytree import flatten, path_of
from gshard._util.tracebacks import named_as
from gshard._util.validation import check_takes, shown
from gshard.train_state.components import Components, Kind, PureLoss
from gshard.train_state.frozen import (
    FROZEN,
    OVERWRITTEN,
    PARAMETERS,
    all_params,
    join_overwritten,
    no_change,
    overwritten,
    put_back,
    take_out,
    thawed,
    trained_opt_state,
    updated,
    without_frozen,
)
from gshard.train_state.initial import NotMade, initial


@dataclass(frozen=True)
class Linen(Kind):
    """A Flax `TrainState` or a subclass of it with more fields.

    Attributes:
      frozen: paths of the parameters that are not trained; they become non-trainable state.
    """

    frozen: frozenset[str] = frozenset()
    arguments: ClassVar[tuple[str, ...]] = ("state",)  # of a train step, before the batch

    def freeze(
        self, state: Any, frozen: Any, paths_of: Callable[[Any, Any], frozenset[str]]
    ) -> Linen:
        kind = Linen(paths_of(updated(state.params), frozen))
        _warn_of_collections(kind.trained(updated(state.params)))
        return kind

    def narrow(self, state: Any) -> Any:
        tx, not_made = thawed(state.tx, self.frozen), isinstance(state.opt_state, NotMade)
        if not (self.frozen or not_made):
            return state
        trained = self.trained(updated(state.params))
        opt_state = (
            initial(tx, trained) if not_made else trained_opt_state(tx, trained, state.opt_state)
        )
        return state.replace(tx=tx, opt_state=opt_state)

    def split(self, state: Any) -> Components:
        known = ("params", "opt_state", "step")
        extra = {name: getattr(state, name) for name in _fields(state, True) if name not in known}
        parts = self.split_target(state.params, extra)
        return dataclasses.replace(parts, opt_state=state.opt_state, step=state.step)

    def split_target(self, params: Any, collections: dict[str, Any]) -> Components:
        if isinstance(params, TrainState):
            raise GShardError(
                "value_and_grad takes the parameters, and was given the state. Pass state.params, "
                "and further fields by name: value_and_grad(loss_fn, plan)(state.params, batch, "
                "batch_stats=state.batch_stats)."
            )
        trained, frozen = take_out(updated(params), self.frozen)
        non_trainable = {
            **collections,
            **overwritten(params),
            **({FROZEN: frozen} if frozen else {}),
        }
        return Components(trained, None, None, non_trainable)

    def trained(self, tree: Any) -> Any:
        return take_out(tree, self.frozen)[0]

    def full_update(self, updates: Any, params: Any) -> Any:
        return put_back(updates, no_change(take_out(params, self.frozen)[1]))

    def with_frozen(self, trained: Any, params: Any) -> Any:
        return put_back(trained, take_out(params, self.frozen)[1])

    def plain_tx(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return without_frozen(tx, self.frozen)

    def split_inference(self, state: Any) -> Components:
        return dataclasses.replace(self.split(state), opt_state=None)

    def merge(self, parts: Components, like: Any, tx: optax.GradientTransformation) -> Any:
        fields = {"opt_state": parts.opt_state, "step": parts.step, "tx": tx}
        fields |= _without_params(parts.non_trainable)
        return like.replace(params=all_params(parts.params, parts.non_trainable), **fields)

    def check(self, state: Any) -> None:
        if isinstance(state.params, optax.LookaheadParams):
            raise GShardError(
                "the parameters are optax.LookaheadParams, whose slow parameters have no gradient, "
                "but gshard needs a gradient for each parameter. Pass only the fast parameters, "
                "with an optimizer that keeps the slow ones in its state, where they are sharded: "
                'see "Lookahead" on the page "The train step" of the documentation.'
            )
        if state.step.shape or not jnp.issubdtype(state.step.dtype, jnp.integer):
            raise GShardError(
                f"state.step is {state.step.dtype}{list(state.step.shape)}: it must be an "
                "integer scalar, the number of steps taken; for example state.replace(step=0)."
            )
        replaced = overwritten(state.params).get(OVERWRITTEN, {})
        for path, x in zip(*flatten(replaced)[:2], strict=True):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise GShardError(
                    f"{path} has dtype {x.dtype}: only a floating parameter has a gradient that "
                    "could replace it."
                )

    def check_step(self, state: Any, loss_fn: Callable[..., Any], rng: Any) -> None:
        optional = _keywords(loss_fn)[0] - opened(loss_fn).keywords.keys() - {*_fields(state, True)}
        if rng is None and "rng" in optional and _is_0_or_none(loss_fn, "rng"):
            warn(
                f"{place_of(loss_fn)} takes rng=, and make_train_step was given none: where the "
                "loss needs a key, as for dropout, it has none. Pass rng=jax.random.key(0) to "
                "make_train_step; if this is intended, pass functools.partial(loss_fn, rng=None) "
                "as the loss."
            )
        for name in _fields(state, True):
            if isinstance(getattr(state, name), DynamicScale):
                warn(
                    f"make_train_step does not use the DynamicScale in state.{name}. Leave the "
                    "field out: scaler=gshard.GradScaler() scales the loss."
                )
        if type(state).apply_gradients is not TrainState.apply_gradients:
            raise GShardError(
                f"{type(state).__name__} has an apply_gradients of its own, which make_train_step "
                "would not call. Keep your own jitted step and take the gradient with "
                'gshard.value_and_grad(loss_fn, plan): see the page "Your own loop" of the '
                "documentation."
            )

    def update(self, state: Any, parts: Components) -> Any:
        return self.merge(parts, state, state.tx)

    def call_after(self, fn: Callable[..., Any], state: Any) -> Any:
        new = fn(state)
        if type(new) is not type(state):
            raise GShardError(
                f"post_update(state) returned {shown(new)}. Return the {type(state).__name__}, "
                "such as state.replace(ema=...)."
            )
        fixed = _fields(state, False)
        if changed := [name for name in fixed if getattr(new, name) is not getattr(state, name)]:
            raise GShardError(
                f"post_update changes {some(changed)}, which is fixed while a step is compiled. "
                "Change arrays only."
            )
        return new

    def absorb(self, params: Any, parts: Components, updates: dict[str, Any]) -> dict[str, Any]:
        del params, parts
        return _without_params(updates)

    def untrained(self, state: Any) -> Collection[str]:
        del state
        return PARAMETERS

    def params_of(self, parts: Components, template: Any) -> Any:
        del template
        return all_params(parts.params, parts.non_trainable)

    def tx(self, state: Any) -> optax.GradientTransformation:
        return state.tx

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        return {path: box.names for path, box in _named_boxes(state).items()}

    def mesh_names(self, state: Any) -> dict[str, tuple[Any, ...]]:
        found = {}
        for path, box in _named_boxes(state).items():
            logical = isinstance(box, nn.LogicallyPartitioned)  # by its rules, or those in force
            axes = logical_to_mesh_axes(box.names, box.rules) if logical else box.names
            found[path] = tuple(axes or ())
        return found

    def loss(
        self,
        loss_fn: Callable[..., Any],
        mutable: tuple[str, ...],
        static: Any,
        by_name: Collection[str] = (),
        what: str = "the loss",
    ) -> PureLoss:
        del static, what
        named, needed, takes_any = _keywords(loss_fn)
        if takes_any:
            named |= {"rng", *mutable, *by_name}
        if unknown := [name for name in by_name if name not in named]:
            raise GShardError(
                f"{place_of(loss_fn)} takes no {some(unknown)}, which value_and_grad(loss_fn, "
                f"plan)(params, batch, ...) was given.{did_you_mean(unknown[0], named)} Leave it "
                "out, or make it an argument of the loss: loss_fn(params, batch, *, "
                f"{unknown[0]})."
            )
        bound = opened(loss_fn).keywords.keys() - {*by_name}
        named -= bound
        if both := bound.intersection(mutable):
            raise GShardError(
                f"mutable={mutable!r}: functools.partial has bound {some(sorted(both))} in "
                f"{place_of(loss_fn)}, so the loss would never see what it returns. Bind nothing "
                "that changes."
            )

        def pure(params: Any, non_trainable: dict[str, Any], batch: Any, rng: Any) -> Any:
            if rng is not None and "rng" in bound:
                raise GShardError(
                    "rng= was given, and functools.partial has bound rng in the loss already. "
                    "Leave out one of the two."
                )
            if rng is not None and "rng" not in named:
                raise GShardError(
                    "rng= was given, but the loss does not take it. Write loss_fn(params, batch, "
                    "*, rng), or leave rng= out."
                )
            available = _without_params(non_trainable) | ({} if rng is None else {"rng": rng})
            missing = needed - set(available)
            if missing:
                only = f"only {some(sorted(available))} is" if available else "nothing is"
                raise GShardError(
                    f"{place_of(loss_fn)} requires {some(sorted(missing))}, but {only} available. "
                    "It is called with params, batch, the further fields of the state that it "
                    "names, and rng where one was passed (make_train_step(rng=jax.random.key(0)), "
                    "or value_and_grad(loss_fn, plan)(params, batch, rng=key)). Whatever else it "
                    "needs can be part of the batch, also a key: {**batch, 'key': key}."
                )
            given = {name: value for name, value in available.items() if name in named}
            if "step" in named - set(available) and _is_0_or_none(loss_fn, "step"):
                warn(
                    f"{place_of(loss_fn)} takes step=, which gshard does not pass, so it "
                    "always has its default. Pass it in the batch: {**batch, 'step': np.int32(n)}."
                )
            boxed = all_params(params, non_trainable)
            unboxed = jax.tree.map(
                lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x, boxed, is_leaf=_is_box
            )
            check_takes(
                loss_fn, "A loss is called as loss_fn(params, batch).", unboxed, batch, **given
            )
            try:
                out = loss_fn(unboxed, batch, **given)
            except AttributeError as error:
                if error.obj is not unboxed or error.name not in _OF_STATE | available.keys():
                    raise
                raise GShardError(
                    f"{place_of(loss_fn)} reads .{error.name} of its first argument, which is the "
                    "tree of parameters and not the state. Write f(params, batch); further fields "
                    "of the state are arguments by their names: f(params, batch, *, batch_stats)."
                ) from error
            return _take_updates(out, mutable, non_trainable) if mutable else (out, {})

        return named_as(loss_fn, pure)

    def gradients(self, grads: Any, params: Any, updates: dict[str, Any]) -> Any:
        structure = jax.tree.structure(self.trained(updated(params)))
        return join_overwritten(jax.tree.unflatten(structure, jax.tree.leaves(grads)), updates)


# Fields of a state that a loss may look for in the parameters.
_OF_STATE = {"apply_gradients", *(field.name for field in dataclasses.fields(TrainState))}


COLLECTIONS = ("batch_stats", "cache", "intermediates")  # of Flax's modules, never trained


def _without_params(non_trainable: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the non-trainable state that is not in the user's parameter tree."""
    return {name: x for name, x in non_trainable.items() if name not in PARAMETERS}


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _named_boxes(state: Any) -> dict[str, Any]:
    """Returns, by path, the boxes of parameters that name their dimensions."""
    boxes, _ = jax.tree_util.tree_flatten_with_path(updated(state.params), is_leaf=_is_box)
    return {path_of(keys): box for keys, box in boxes if hasattr(box, "names")}


def fixed_values(state: Any) -> dict[str, Any]:
    """The fields of a `TrainState` without arrays, but for its optimizer and `apply_fn`."""
    if not isinstance(state, TrainState):
        return {}
    names = [name for name in _fields(state, False) if name not in ("tx", "apply_fn")]
    return {name: getattr(state, name) for name in names}


def _fields(state: Any, arrays: bool) -> list[str]:
    """Returns the names of the fields that hold arrays, or of the others."""
    fields = dataclasses.fields(state)
    return [f.name for f in fields if f.metadata.get("pytree_node", True) is arrays]


def _warn_of_collections(trained: Any) -> None:
    """Warns of all that `model.init` returned, passed as the parameters."""
    if not isinstance(trained, Mapping) or "params" not in trained:
        return
    if others := [x for x in COLLECTIONS if jax.tree.leaves(trained.get(x))]:
        warn(
            f"the parameters have {some(others)} next to 'params', as model.init returns them, so "
            "the optimizer is given these too. Pass variables['params'], and keep the others in "
            f"fields of a TrainState that the loss is given, or pass frozen='^{others[0]}/'. "
            'See the page "Losses" of the documentation.'
        )


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


def _is_0_or_none(loss_fn: Callable[..., Any], name: str) -> bool:
    """Whether that is the default of an argument."""
    default = inspect.signature(loss_fn).parameters[name].default
    return default is None or (isinstance(default, (int, float)) and default == 0)


def _take_updates(
    out: Any, mutable: tuple[str, ...], fields: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Splits `(loss, updates)` or `(loss, (aux, updates))`; warns of other fields of the state."""
    loss, updates = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if isinstance(updates, tuple) and len(updates) == 2:
        loss, updates = (loss, updates[0]), updates[1]
    if not isinstance(updates, Mapping) or not set(mutable) <= set(updates):
        raise GShardError(
            f"with mutable={mutable!r} the loss returns (loss, updates), or (loss, (aux, updates)) "
            f"with has_aux=True, where updates has the keys {some(mutable)}; it returned "
            f"{jax.tree.map(lambda x: getattr(x, 'shape', x), out)}."
        )
    if lost := [name for name in updates if name in fields and name not in mutable]:
        warn(
            f"the loss returns new values of {some(lost)}, which mutable={mutable!r} does not "
            f"name, so the state keeps its old ones. Pass mutable={(*mutable, *lost)!r}."
        )
    return loss, {name: updates[name] for name in mutable}
