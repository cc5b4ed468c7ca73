"""Results and options of a step that do not exist."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

import gshard


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean(batch["x"] @ params["w"])


state = {"w": jnp.ones((64, 32))}, optax.adam(1e-3)
mesh = gshard.make_mesh({"data": 8})
sharded, plan = gshard.shard_train_state(state, mesh, "os_g")
print(sharded.params, plan.level)
print(sharded.parameters)  # wrong
print(plan.levels)  # wrong
gshard.make_train_step(loss_fn, plan, accumulate="sync")
gshard.make_train_step(loss_fn, plan, accumulate="scater")  # wrong
gshard.value_and_grad(loss_fn, plan, accumulate="all")  # wrong
step = gshard.make_train_step(loss_fn, plan)
step(sharded)  # wrong
sharded, metrics = step(sharded, {"x": jnp.ones((8, 64))})
print(metrics.loss)  # wrong
gshard.Reduced(metrics["loss"], "average")  # wrong
gshard.make_mehs()  # wrong
