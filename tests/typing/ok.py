"""What a user writes: every line is well typed."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import gshard


class MyState(TrainState):
    """A train state with a further field."""

    calls: int = 0


def init(key: jax.Array) -> MyState:
    params = {"w": jax.random.normal(key, (64, 32))}
    return MyState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["x"] @ params["w"])


mesh = gshard.make_mesh({"data": 8})
key = jax.random.key(0)
mine, plan = gshard.shard_train_state(init(key), mesh, "p_g_os", indivisible="replicate")
assert_type(mine, MyState)
assert_type(plan, gshard.Plan)
assert_type(gshard.shard_train_state(init, mesh, level=3, init_args=(key,))[0], MyState)
plain, _ = gshard.shard_train_state(({"w": jnp.ones(8)}, optax.adam(1e-3)), mesh, "auto")
assert_type(plain, TrainState)
multi = optax.MultiSteps(optax.adam(1e-3), 2)
assert_type(gshard.shard_train_state(({"w": jnp.ones(8)}, multi), mesh, "os")[0], TrainState)

step = gshard.make_train_step(loss_fn, plan, accumulate="scatter")
mine, metrics = step(mine, {"x": jnp.ones((8, 64))})
assert_type(mine, MyState)
print(mine.calls, metrics["loss"], step.budget)


class Model(nnx.Module):
    """One matrix."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(64, 32, rngs=rngs)


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
(model, optimizer), plan = gshard.shard_train_state((model, optimizer), mesh, "zero2")
print(model.dense.kernel, gshard.make_train_step(loss_fn, plan)(model, optimizer, {})["loss"])
print(gshard.Reduced(1, "max"))
