"""Compiles layers of experts for eight GPUs that are not there; prints their memory, as JSON.

There are too few experts to be divided, so that what is divided is behind them. Run in a process of
its own by `tests/train/comm/test_memory_layout.py`.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.memory.footprint import trace_step
from tests.compiled_memory import memory_on_gpu

LAYERS, EXPERTS, WIDTH = 32, 3, 512


def loss(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.einsum("rxi,xio->rxo", x, w.astype(jnp.bfloat16))), None

    return (jax.lax.scan(layer, x, params["layers"])[0].astype(jnp.float32) ** 2).mean()


def main() -> None:
    target = parse_target("h100:1x8")
    mesh = gshard.make_mesh(devices=target.described_devices())
    params = {"layers": jax.ShapeDtypeStruct((LAYERS, EXPERTS, WIDTH, WIDTH), jnp.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "p_g_os", scan_axes={"^layers": 0}
    )
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((64, EXPERTS, WIDTH), jnp.bfloat16, sharding=rows)
    found = {"parameters": plan.bytes_per_device["params"]}
    for name, reshard in (("parts", True), ("neighbours", 2)):
        step = gshard.make_train_step(loss, plan, reshard_after_forward=reshard)
        found[name] = memory_on_gpu(trace_step(step, state, batch), plan)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
