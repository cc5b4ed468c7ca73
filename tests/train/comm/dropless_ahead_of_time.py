"""Compiles experts without capacity for machines that are not there; prints what is sent, as JSON.

Run in a process of its own by `tests/train/comm/test_ragged.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target

GROUPS, TOKENS, WIDTH, EXPERTS, CHOSEN = 64, 64, 1024, 8, 2


def loss(params: Any, x: jax.Array) -> jax.Array:
    def experts(kernel: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, kernel, sizes)

    routing = gshard.expert.route(x @ params["router"], CHOSEN, capacity_factor=None)
    # Twice: the tokens of the first layer have no gradient, which is then not sent.
    for layer in ("first", "second"):
        x = x + gshard.expert.dropless(experts, params[layer], x, routing, by="all_to_all")
    return jnp.square(x).mean()


def main() -> None:
    target = parse_target(sys.argv[1])
    mesh = gshard.make_mesh({"data": 2, "expert": 4}, devices=target.described_devices())
    shapes = {name: (EXPERTS, WIDTH, WIDTH) for name in ("first", "second")}
    shapes["router"] = (WIDTH, EXPERTS)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    keep = {"first|second": ("expert", 0)}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os", keep=keep)
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = jax.ShapeDtypeStruct((GROUPS, TOKENS, WIDTH), jnp.float32, sharding=rows)
    audit = gshard.audit(gshard.make_train_step(loss, plan), state, batch)
    found = {"exceeded": [str(x) for x in audit.exceeded]}
    found["rows"] = GROUPS * TOKENS // 8 * CHOSEN * WIDTH  # elements that a device sends once
    for kind in ("ragged-all-to-all", "all-gather"):
        of_tokens = [x for x in audit.collectives if x.kind == kind and x.purpose != "gather"]
        found[kind] = sum(x.elements for x in of_tokens)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
