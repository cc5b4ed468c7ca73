"""Runs a user's function after the update, inside the compiled step, such as for averages.

It gets the traced state as `plan.unwrap` returns it: logical shapes, the user's optimizer and its
state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.pytree import differences, flatten
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.optim.offload import to_device, to_host
from gshard.train.optim.optimizer import keep_unless
from gshard.train_state import Components


def apply_post_update(
    fn: Callable[..., Any], parts: Components, static: Any, plan: Plan, updates: jax.Array
) -> Components:
    """Applies `fn` to the updated components; where `updates` is false they do not change.

    Arrays that `fn` returns unchanged keep their layout and cost nothing.

    Args:
      fn: the user's `post_update`.
      parts: the components after the update, in storage shapes.
      static: `Components.static` of the state that the step was given.
      plan: the plan, which has the layouts.
      updates: boolean scalar, whether the step updates the state.

    Raises:
      GShardError: `fn` changes the tree, a shape or a dtype.
    """
    precise, places = plan.master_params(parts.params, parts.opt_state)
    rest = (parts.step, parts.non_trainable)
    stored = Components(precise, parts.opt_state.inner, *rest, static)
    wanted = plan.layouts
    layouts = jax.tree.leaves(Components(places, plan.opt_state, wanted.step, wanted.non_trainable))
    paths, leaves, structure = flatten(stored)
    given = [layout.unpad(x) for x, layout in zip(to_device(leaves, layouts), layouts, strict=True)]
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
    leaves = [
        old if new is seen else _where(updates, plan.pin(new, layout), old, layout, plan)
        for new, seen, old, layout in zip(found, given, leaves, layouts, strict=True)
    ]
    new = jax.tree.unflatten(structure, leaves)
    copies = dict(zip(*flatten(new.params)[:2], strict=True))
    master = {path: copies[path] for path in plan.master}
    return Components(
        _computed(parts, new, plan),
        parts.opt_state._replace(inner=new.opt_state, master=master),
        new.step,
        new.non_trainable,
    )


def _where(updates: jax.Array, new: Any, old: Any, layout: Layout, plan: Plan) -> Any:
    """Returns the new value where a step updates, else the old one, in the leaf's own memory."""
    return to_host(keep_unless(updates, new, to_device(old, layout)), layout, plan)


def _computed(parts: Components, new: Components, plan: Plan) -> Any:
    """Returns the stored parameters, rounded again from every master copy that changed."""
    before = parts.opt_state.master
    leaves, structure = jax.tree.flatten(parts.params)
    rounded = [
        copy
        if layout.path not in plan.master
        else old
        if copy is before[layout.path]
        else to_host(_rounded(copy, plan.master[layout.path], layout, plan), layout, plan)
        for old, copy, layout in zip(
            leaves, jax.tree.leaves(new.params), jax.tree.leaves(plan.params), strict=True
        )
    ]
    return jax.tree.unflatten(structure, rounded)


def _rounded(copy: Any, master: Layout, layout: Layout, plan: Plan) -> Any:
    return plan.pin(master.unpad(to_device(copy, master)).astype(layout.dtype), layout)


def _fitting(parts: Components, known: list[str], layouts: list[Layout]) -> list[Any]:
    """Returns the leaves that `post_update` made, after checking them against the state."""
    paths, leaves, _ = flatten(parts)
    if paths != known:
        raise GShardError(
            f"post_update changes the tree of the state: {differences(paths, known)}. Give new "
            "values to the fields that the state has; a new field is added before "
            "shard_train_state."
        )
    for path, x, layout in zip(paths, leaves, layouts, strict=True):
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if shape != layout.shape or dtype != layout.dtype:
            raise GShardError(
                f"post_update makes {path} {dtype}{list(shape)}, and the state has "
                f"{layout.dtype}{list(layout.shape)}. It must keep its shape and dtype."
            )
    return leaves
