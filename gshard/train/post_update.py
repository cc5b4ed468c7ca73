"""Runs a user's function after the update, inside the compiled step, such as for averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, warn
from gshard._util.pytree import differences, flatten, map_leaves
from gshard._util.validation import shown
from gshard.sharding.layout import DEVICE, Layout
from gshard.sharding.plan import Plan
from gshard.sharding.quantized_array import is_quantized
from gshard.sharding.state_dtype import decoded_layouts
from gshard.train.optim.offload import to_device, to_host
from gshard.train.optim.optimizer import cut_padding
from gshard.train.optim.skip_update import keep_unless
from gshard.train_state import Components
from gshard.train_state.linen import fixed_values


def warn_of_fixed_fields(state: Any, plan: Plan, told: set[str]) -> None:
    """Warns once of each field without arrays that has another value than at first."""
    first = fixed_values(plan.template)
    for name, new in fixed_values(state).items():  # those of an NNX model are a part of the program
        old = first.get(name, new)  # a subclass may have more
        if new is not old and name not in told and not _equal(new, old):
            told.add(name)
            warn(
                f"state.{name} was {shown(old)} in shard_train_state and is {shown(new)} now. "
                "If post_update= reads it, it still sees the first value, with which the step was "
                f"compiled: make {name} a field with an array, or shard the state again with "
                "the new value."
            )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(np.all(a == b))
    except Exception:  # of any class of the user's
        return False


def apply_post_update(
    fn: Callable[..., Any], parts: Components, static: Any, plan: Plan, updates: jax.Array
) -> Components:
    """Applies `fn` to the updated components; where `updates` is false they do not change.

    `fn` gets the traced state as `plan.unwrap` returns it: logical shapes, the user's optimizer and
    its state. Arrays that it returns unchanged keep their layout and cost nothing.
    """
    precise, layouts = plan.master_params(parts.params, parts.opt_state)
    rest = (parts.step, parts.non_trainable)
    inner, of_inner = _decoded(parts.opt_state.inner, plan)
    stored = Components(precise, inner, *rest, static)
    layouts = jax.tree.leaves(
        Components(layouts, of_inner, plan.layouts.step, plan.layouts.non_trainable)
    )
    paths, leaves, structure = flatten(stored)
    given = cut_padding(to_device(leaves, layouts), layouts)
    state = plan.kind.merge(
        jax.tree.unflatten(structure, given), plan.template, plan.kind.plain_tx(plan.tx)
    )
    try:
        made = plan.kind.call_after(fn, state)
    except GShardError:
        raise
    except Exception as error:
        error.add_note(
            "This came from post_update=, which is traced inside the compiled step: its arrays "
            "have shapes and dtypes, and no values that Python could read."
        )
        raise
    found = _fitting(plan.kind.split(made), paths, layouts)

    def kept(old: Any, new: Any, seen: Any, layout: Layout) -> Any:
        if new is seen:
            return old
        chosen = keep_unless(updates, plan.pin(new, layout), to_device(old, layout))
        return to_host(chosen, layout, plan)

    def rounded(old: Any, copy: Any, layout: Layout) -> Any:
        """Rounds a parameter again from its master copy, if that changed."""
        if layout.path not in plan.master:
            return copy
        if copy is parts.opt_state.master[layout.path]:
            return old
        master = plan.master[layout.path]
        copy = master.unpad(to_device(copy, master)).astype(layout.dtype)
        return to_host(plan.pin(copy, layout), layout, plan)

    new = jax.tree.unflatten(structure, map_leaves(kept, leaves, found, given, layouts))
    copies = dict(zip(*flatten(new.params)[:2], strict=True))
    master = {path: copies[path] for path in plan.master}
    after = _encoded(new.opt_state, inner, parts.opt_state.inner, plan)
    return Components(
        map_leaves(rounded, parts.params, new.params, plan.params),
        parts.opt_state._replace(inner=after, master=master),
        new.step,
        new.non_trainable,
    )


def _decoded(inner: Any, plan: Plan) -> tuple[Any, Any]:
    """Returns an optimizer state with its quantized arrays decoded on the device, and layouts."""
    nodes, structure = jax.tree.flatten(plan.opt_state, is_leaf=is_quantized)
    of_inner = [decoded_layouts(x).in_memory(DEVICE) if is_quantized(x) else x for x in nodes]
    pairs = zip(jax.tree.leaves(inner, is_leaf=is_quantized), nodes, strict=True)
    leaves = [to_device(x, layout).decode() if is_quantized(x) else x for x, layout in pairs]
    return structure.unflatten(leaves), structure.unflatten(of_inner)


def _encoded(new: Any, decoded: Any, stored: Any, plan: Plan) -> Any:
    """Undoes `_decoded`; arrays that are still those of `decoded` are those of `stored`."""
    nodes, structure = jax.tree.flatten(stored, is_leaf=is_quantized)
    encoded = structure.flatten_up_to(plan.encode(new, to_device(stored, plan.opt_state)))
    layouts = structure.flatten_up_to(plan.opt_state)
    columns = zip(*map(jax.tree.leaves, (new, decoded)), nodes, encoded, layouts, strict=True)
    return structure.unflatten(
        x if not is_quantized(old) else old if x is given else to_host(code, layout, plan)
        for x, given, old, code, layout in columns
    )


def _fitting(parts: Components, known: list[str], layouts: list[Layout]) -> list[Any]:
    """Returns the leaves that `post_update` made, after checking them against the state."""
    paths, leaves, _ = flatten(parts)
    paths, known = ([x.removeprefix("non_trainable/") for x in xs] for xs in (paths, known))
    if paths != known:
        raise GShardError(
            f"post_update changes the tree of the state: {differences(paths, known)}. Replace only "
            "values of fields that the state has; add a new field before shard_train_state."
        )
    for path, x, layout in zip(paths, leaves, layouts, strict=True):
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if shape != layout.shape or dtype != layout.dtype:
            raise GShardError(
                f"post_update makes {path} {dtype}{list(shape)}, and the state has "
                f"{layout.dtype}{list(layout.shape)}. It must keep its shape and dtype."
            )
    return leaves
