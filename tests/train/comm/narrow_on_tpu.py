"""Compiles a step that reads a narrow matrix for TPU chips that are not there; prints JSON.

Run in a process of its own by `tests/train/comm/test_memory_layout.py`.
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

LONG, NARROW, ROWS = 65536, 8, 64


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.square(batch @ params["narrow"] @ params["own"]).mean()


def main() -> None:
    mesh = gshard.make_mesh(devices=parse_target("tpu-v5e:2x2").described_devices())
    params = {
        "narrow": jax.ShapeDtypeStruct((LONG, NARROW), jnp.float32),
        "own": jax.ShapeDtypeStruct((NARROW, NARROW), jnp.float32),
    }
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os_g")
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((ROWS, LONG), jnp.float32, sharding=rows)
    step = gshard.make_train_step(loss, plan, micro_batches=2)
    memory = step.lower(state, batch).compile().memory_analysis()
    found = {"narrow": 4 * LONG * NARROW, "batch": 4 * LONG * ROWS // mesh.size}
    found |= {"peak": memory.peak_memory_in_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
