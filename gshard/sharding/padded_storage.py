"""Warns where arrays that are stored with padding are used outside gshard's steps.

What gshard passes to a loss has its logical shape. An array of a sharded state that the loss closes
over comes as it is stored, with the zeros of `indivisible="pad"` at its end: a maximum, a mean or
an argmax over them differs from one device. So does calling an NNX model directly.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax import core

from gshard._util.errors import some, warn
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan

_Form = tuple[tuple[int, ...], str]  # stored shape and dtype
_Stored = tuple[Layout, weakref.WeakSet[Plan]]  # a layout with padding, and the plans that have it
_stored: dict[_Form, dict[Any, _Stored]] = {}  # by form, and then by sharding


def remember(plan: Plan) -> None:
    """Notes for good which arrays of a state are stored with padding."""
    for layout in jax.tree.leaves(plan.layouts):
        if layout.padding:
            of_form = _stored.setdefault((layout.stored_shape, str(layout.dtype)), {})
            of_form.setdefault(plan.sharding(layout), (layout, weakref.WeakSet()))[1].add(plan)


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

    Of a tracer only shape and dtype are known: it counts as long as such a state is in use.

    The loss closes over them, or is given them as the argument of this name.
    """
    how = f"{name}= of the loss is" if name else "the loss closes over"
    for x in arrays:
        of_form = _stored.get((getattr(x, "shape", ()), str(getattr(x, "dtype", None))))
        if not of_form or not isinstance(x, jax.Array):
            continue
        if isinstance(x, core.Tracer):
            found = next((stored for stored in of_form.values() if stored[1]), None)
        else:
            found = of_form.get(x.sharding)
        if found is not None:
            layout, _ = found
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
    padded = [
        f"{layout.path} {list(layout.shape)} as {list(layout.stored_shape)}"
        for of_form in _stored.values()
        for layout, plans in list(of_form.values())[:1]
        if plans
        and layout.dim is not None
        and {str(x[layout.dim]) for x in (layout.shape, layout.stored_shape)} <= sizes
    ]
    if padded and "shape" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"gshard stores some arrays with padding: {some(padded, 3)}. If the loss closes over "
            "such an array of another sharded state (a second network), it sees the padded shape. "
            "Make that array a field of the state that is trained, close over gshard.full_params "
            'of the other state, or shard that one with indivisible="replicate".'
        )
