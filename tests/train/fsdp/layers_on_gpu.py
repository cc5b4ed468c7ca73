"""Compiles an unrolled model for eight GPUs that are not there; prints what is gathered, as JSON.

Run in a process of its own by `tests/train/fsdp/test_regather.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.hlo.parser import read_module

LAYERS, WIDTH, ROWS = 8, 4096, 512


def loss(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"])
    return (x**2).mean()


def whole_at_once(text: str) -> tuple[int, int]:
    """Of a scheduled program: gathered leaves alive at once, gathers that overlap products."""
    module = read_module(text)
    order = module.computations[module.entry].instructions
    last = {name: i for i, one in enumerate(order) for name in one.operands}
    alive: dict[str, int] = {}
    most = spans = 0
    running = 0
    for i, one in enumerate(order):
        alive = {name: end for name, end in alive.items() if end >= i}
        if one.opcode == "all-gather-start":
            done = next(x for x in order[i:] if one.name in x.operands)
            alive[one.name] = last[done.name]
            running = i
        elif one.opcode == "all-gather":
            alive[one.name] = last[one.name]
        elif one.opcode == "all-gather-done":
            spans += any("gemm" in x.name for x in order[running:i])
        most = max(most, len(alive))
    return most, spans


def main() -> None:
    mesh = gshard.make_mesh(devices=parse_target("h100:1x8").described_devices())
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None,
            params={f"layer_{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)},
            tx=optax.adam(1e-3),
        )
    )
    state, plan = gshard.shard_train_state(state, mesh, "p_g_os")
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32, sharding=rows)
    found = {}
    for name, options in (
        ("default", {}),
        ("sync", {"prefetch": False}),
        ("kept", {"reshard_after_forward": False}),
    ):
        compiled = gshard.make_train_step(loss, plan, **options).lower(state, batch).compile()
        text = compiled.as_text()
        assert "is_scheduled=true" in text.splitlines()[0]
        whole, spans = whole_at_once(text)
        gathers = len(re.findall(r" all-gather(-start)?\(", text))
        temporary = compiled.memory_analysis().temp_size_in_bytes
        found[name] = {"whole": whole, "spans": spans, "gathers": gathers, "temp": temporary}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
