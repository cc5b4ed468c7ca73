"""Finds the optimizer's arrays that depend on the parameters' values, and makes them again.

Most moments begin with zeros. Schedule-free optimizers, Prodigy, DoG and Lookahead begin with
copies of the parameters, which have to change with parameters that are loaded before the first
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gshard._util.jaxpr_dataflow import inputs_used
from gshard._util.pytree import map_leaves
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.optim.offload import to_device, to_host
from gshard.train.optim.optimizer import local_shards
from gshard.train_state.components import ShardedOptState


def layouts_made_of_params(plan: Plan) -> list[Layout] | None:
    """The layouts of those arrays; None if the optimizer's `init` cannot be traced."""
    own = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.grads)
    layouts = jax.tree.leaves(plan.decoded_opt_state)
    try:
        program, made = jax.make_jaxpr(plan.tx.init, return_shape=True)(own)
    except Exception:  # it reads values
        return None
    if [x.shape for x in jax.tree.leaves(made)] != [x.shape for x in layouts]:
        return []  # the state of no optimizer, or of another one: it is not trained
    used = inputs_used(program.jaxpr)
    return [layout for layout, inputs in zip(layouts, used, strict=True) if inputs]


def make_of_params(
    plan: Plan, layouts: Sequence[Layout], params: Any, state: ShardedOptState
) -> ShardedOptState:
    """The optimizer's state with the arrays of these layouts as its `init` makes them."""
    chosen = {layout.path for layout in layouts}

    def init(params: Any, master: Any) -> list[Any]:
        on_device = to_device(params, plan.params), to_device(master, plan.master)
        own, structure = local_shards(*on_device, plan)
        inner = plan.tx.init(jax.tree.unflatten(structure, own))
        every = zip(jax.tree.leaves(inner), jax.tree.leaves(plan.decoded_opt_state), strict=True)
        made = [x for x, layout in every if layout.path in chosen]
        return to_host(plan.pin(made, [*layouts]), [*layouts], plan)

    new = iter(jax.jit(init)(params, state.master))
    inner = map_leaves(
        lambda x, layout: next(new) if layout.path in chosen else x, state.inner, plan.opt_state
    )
    return state._replace(inner=inner)
