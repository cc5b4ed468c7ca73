"""Compiles a model whose head is its embedding for GPUs that are not there; prints memory, as JSON.

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
from gshard.analysis.memory.footprint import trace_step
from tests.compiled_memory import memory_on_gpu

WORDS, WIDTH, ROWS, LENGTH = 8192, 64, 32, 32


def loss(params: Any, batch: Any) -> jax.Array:
    """Looks words up, and compares with all of them, position by position."""
    table = params["table"].astype(jnp.bfloat16)
    x = jnp.take(table, batch["words"], axis=0) @ params["own"].astype(jnp.bfloat16)
    head = table.T

    @jax.checkpoint
    def position(total: jax.Array, now: Any) -> tuple[jax.Array, None]:
        x, y = now
        logits = (x @ head).astype(jnp.float32)
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, y).sum(), None

    positions = (x.transpose(1, 0, 2), batch["next"].T)
    return jax.lax.scan(position, jnp.float32(0), positions)[0] / batch["next"].size


def gathers_beside_tensor_parallelism(devices: Any) -> int:
    """How often a program at `dp` gathers, where a weight is sharded over an axis of the user's."""
    mesh = gshard.make_mesh(devices=devices, extra={"model": 2})
    columns = NamedSharding(mesh, jax.P(None, "model"))
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=columns)}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "dp")
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    step = gshard.make_train_step(
        lambda params, x: jnp.square(x @ params["w"]).mean(), plan, micro_batches=2
    )
    return step.lower(state, batch).compile().as_text().count(" all-gather")


def main() -> None:
    target = parse_target("h100:1x4")
    mesh = gshard.make_mesh(devices=target.described_devices())
    params = {
        "table": jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32),
        "own": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    }
    found: dict[str, Any] = {"table": 4 * WORDS * WIDTH}
    for name, frozen in (("trained", None), ("frozen", "^table")):
        state, plan = gshard.shard_train_state(
            (params, optax.adam(1e-3)), mesh, "os_g", frozen=frozen
        )
        rows = NamedSharding(mesh, plan.batch_spec)
        words = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=rows)
        step = gshard.make_train_step(loss, plan, micro_batches=2)
        found[name] = memory_on_gpu(trace_step(step, state, {"words": words, "next": words}), plan)
    found["gathers"] = gathers_beside_tensor_parallelism(target.described_devices())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
