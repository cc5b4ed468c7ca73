"""Compiles a scanned model for eight GPUs that are not there; prints its memory, as JSON.

Run in a process of its own by `tests/train/optim/test_param_all_gather.py`.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.memory.footprint import trace_step
from tests.compiled_memory import memory_on_gpu

LAYERS, WIDTH = 16, 2048


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return (jax.lax.scan(layer, x, params["layers"])[0] ** 2).mean()


def main() -> None:
    target = parse_target("h100:1x8")
    mesh = gshard.make_mesh(devices=target.described_devices())
    params = {"layers": jnp.zeros((LAYERS, WIDTH, WIDTH), jnp.bfloat16)}
    state = jax.eval_shape(
        lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    )
    state, plan = gshard.shard_train_state(state, mesh, "os_g", scan_axes={"^layers": 0})
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16, sharding=rows)
    traced = trace_step(gshard.make_train_step(loss, plan), state, batch)
    found = {"parameters": 2 * LAYERS * WIDTH**2, **memory_on_gpu(traced, plan)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
