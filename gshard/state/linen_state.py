"""Linen train states as `Parts`, and back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax.core import meta

from gshard.errors import GShardError, some
from gshard.state.parts import Parts, PureLoss


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
