"""Compiles a `dp` step for devices that are not there; prints its all-reduces, as JSON.

Run in a process of its own by `tests/train/comm/test_reduce_buckets.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.hlo.parser import read_arrays, read_module

LAYERS, WIDTH, ROWS = 8, 2048, 512
LAYER = WIDTH * WIDTH + WIDTH


def loss(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"])
    return (x**2).mean()


def all_reduces(text: str) -> tuple[list[int], int]:
    """Of a scheduled program: the elements of each all-reduce, and how many overlap with a product.

    Scalars are left out.
    """
    module = read_module(text)
    order = module.computations[module.entry].instructions
    elements, beside = [], 0
    for i, one in enumerate(order):
        if one.opcode not in ("all-reduce", "all-reduce-start"):
            continue
        given = {name.removeprefix("%") for name in one.operands}
        size = sum(a.elements for x in order if x.name in given for a in read_arrays(x.shape))
        if size < WIDTH:
            continue
        elements.append(size)
        if one.opcode == "all-reduce-start":
            end = next(j for j, x in enumerate(order) if j > i and one.name in x.operands)
            beside += any("gemm" in x.name for x in order[i:end])
    return elements, beside


def main() -> None:
    mesh = gshard.make_mesh(devices=parse_target(sys.argv[1]).described_devices())
    layer = {"kernel": jnp.zeros((WIDTH, WIDTH)), "bias": jnp.zeros((WIDTH,))}
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None,
            params={f"layer_{i}": layer for i in range(LAYERS)},
            tx=optax.adam(1e-3),
        )
    )
    state, plan = gshard.shard_train_state(state, mesh, "dp")
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((mesh.size * ROWS, WIDTH), jnp.float32, sharding=rows)
    found = {}
    for size in (LAYER, 0):
        step = gshard.make_train_step(loss, plan, bucket_size=size)
        text = step.lower(state, batch).compile().as_text()
        assert "is_scheduled=true" in text.splitlines()[0]
        found[size] = all_reduces(text)
    print(json.dumps({"layer": LAYER, "turns": found[LAYER], "free": found[0]}))


if __name__ == "__main__":
    main()
