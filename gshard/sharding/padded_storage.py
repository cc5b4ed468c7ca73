"""Warns of, or refuses, arrays that are stored with padding where gshard does not remove it.

What gshard passes to a loss has its logical shape. An array of a sharded state that the loss closes
over comes as it is stored, with the zeros of `indivisible="pad"` at its end: a maximum, a mean or
an argmax over them differs from one device. So does calling an NNX model directly, and a model
whose stored parameters are sharded once more would train the zeros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import flatten
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan

_Form = tuple[tuple[int, ...], str]  # stored shape and dtype
_stored: dict[_Form, dict[Any, dict[str, Layout]]] = {}  # those with padding, by sharding and path


def remember(plan: Plan) -> None:
    """Notes for good which arrays of a state are stored with padding."""
    for layout in jax.tree.leaves(plan.layouts):
        if layout.padding:
            of_form = _stored.setdefault((layout.stored_shape, str(layout.dtype)), {})
            of_form.setdefault(plan.sharding(layout), {})[layout.path] = layout


def _like(x: Any) -> dict[str, Layout]:
    """The layouts, by path, that an array may have; of a tracer, shape and dtype are known."""
    of_form = _stored.get((getattr(x, "shape", ()), str(getattr(x, "dtype", None))), {})
    if not of_form or not isinstance(x, jax.Array):
        return {}
    if isinstance(x, core.Tracer):
        return next(iter(of_form.values()))
    equal = (s for s in of_form if s.is_equivalent_to(x.sharding, x.ndim))
    return of_form.get(next(equal, None), {})


def refuse_padding(tree: Any) -> None:
    """Refuses to shard arrays as another state stores them, with padding; warns of similar ones."""
    for path, x in zip(*flatten(tree)[:2], strict=True):
        found = _like(x)
        layout = found.get(path, next(iter(found.values()), None))
        if layout is None or isinstance(x, core.Tracer) or not _ends_in_zeros(x, layout):
            continue
        said = (
            f"{path} has shape {x.shape} and ends in zeros. That is how gshard stores "
            f"{layout.path}, whose shape is {layout.shape}, with padding. The zeros would become "
            "part of the model. Shard what plan.unwrap(state) returns, or "
            "gshard.full_params(state); with NNX the model of plan.unwrap((model, optimizer))."
        )
        if path in found:
            raise GShardError(said)
        warn(said)


def _ends_in_zeros(x: jax.Array, layout: Layout) -> bool:
    """Whether the entries in the place of the padding are all 0, and some others are not."""
    dim: Any = layout.dim
    padding = lax.slice_in_dim(x, layout.shape[dim], None, axis=dim)
    return not bool(jnp.any(padding != 0)) and bool(jnp.any(x != 0))


def warn_of_padded_model(plan: Plan) -> None:
    """Warns of an NNX model with padded arrays: `model(x)` would compute with their zeros."""
    padded = [x.path for x in jax.tree.leaves((plan.params, plan.non_trainable)) if x.padding]
    if padded and "model" in plan.kind.arguments:
        warn(
            f"the model holds {some(padded, 3)} padded with zeros, since their dimensions do not "
            "divide by the devices. gshard's steps remove the padding, but model(x) computes with "
            "it: it may fail, or return extra columns. Evaluate with gshard.make_eval_step, or "
            "call the model of plan.unwrap((model, optimizer)). "
            'indivisible="replicate" stores such arrays replicated, without padding.'
        )


def warn_of_padding(arrays: Sequence[Any], name: str = "") -> None:
    """Warns of arrays that look like one of those.

    The loss closes over them, or is given them as the argument of this name.
    """
    how = f"{name}= of the loss is" if name else "the loss closes over"
    for x in arrays:
        for layout in [*_like(x).values()][:1]:
            warn(
                f"{how} an array of shape {x.shape}, the shape in which gshard "
                f"stores {layout.path} of shape {layout.shape}. If it is that array, it is padded "
                "with zeros, and the loss computes with them: pass it as a field of the train "
                "state under the field's own name, which the loss gets without padding; or pass "
                "gshard.full_params(state) of that state; or shard it with "
                'indivisible="replicate".'
            )


def explain_shapes(error: Exception) -> None:
    """Adds a note to an error of a loss that names both sizes of a dimension with padding."""
    sizes = set(re.findall(r"\d+", str(error)))
    padded = {
        f"{layout.path} {list(layout.shape)} as {list(layout.stored_shape)}"
        for of_form in _stored.values()
        for found in of_form.values()
        for layout in found.values()
        if layout.dim is not None
        and {str(x[layout.dim]) for x in (layout.shape, layout.stored_shape)} <= sizes
    }
    if padded and "shape" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"gshard stores some arrays with padding: {some(sorted(padded), 3)}. If the loss "
            "closes over such an array of another sharded state (a second network), it sees the "
            "padded shape. Make that array a field of the state that is trained, close over "
            'gshard.full_params of the other state, or shard that one with indivisible="replicate".'
        )
