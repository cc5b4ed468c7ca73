"""Compiles train steps for eight TPU chips that are not there, and prints their memory as JSON.

Run in a process of its own by `tests/train/optim/test_offload.py`.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.experimental import topologies
from jax.sharding import NamedSharding

import gshard

LAYERS, WIDTH, ROWS = 8, 4096, 64


def loss_of_layers(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"])
    return ((x - batch["y"]) ** 2).mean()


def loss_of_stack(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["stack"])
    return ((x - batch["y"]) ** 2).mean()


def abstract(*shape: int, **more: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, **more)


MODELS = {
    "layers": (loss_of_layers, {f"layer_{i}": abstract(WIDTH, WIDTH) for i in range(LAYERS)}),
    "stack": (loss_of_stack, {"stack": abstract(LAYERS, WIDTH, WIDTH)}),
}
CASES = (
    ("layers", "os_g", None),
    ("layers", "os_g", "bfloat16"),
    ("stack", "os_g", None),
    ("layers", "p_g_os", None),
    ("stack", "p_g_os", None),
    ("stack", "p_g_os", "bfloat16"),
)


def compiled(name: str, level: str, precision: Any, offload: bool, mesh: Any) -> tuple[Any, Any]:
    """The plan, and bytes of one device's memory by use."""
    loss, params = MODELS[name]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None, params=jax.tree.map(lambda x: jnp.zeros(x.shape), params), tx=tx
        )
    )
    options = {"scan_axes": {"^stack$": 0}} if name == "stack" else {}
    state, plan = gshard.shard_train_state(
        state, mesh, level, offload=offload, precision=precision, **options
    )
    rows = NamedSharding(mesh, plan.batch_spec)
    batch = {name: abstract(ROWS, WIDTH, sharding=rows) for name in ("x", "y")}
    return plan, gshard.audit(gshard.make_train_step(loss, plan), state, batch).memory


def main() -> None:
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = gshard.make_mesh(devices=topology.devices)
    rows = []
    for name, level, precision in CASES:
        plan, offload = compiled(name, level, precision, True, mesh)
        _, plain = compiled(name, level, precision, False, mesh)
        rows.append(
            {
                "case": [name, level, precision],
                "host": plan.bytes_per_device["host"],
                "group": max(plan.fetched_at_once),
                "params": sum(
                    x.bytes_per_device for x in jax.tree.leaves(plan.params) if x.on_host
                ),
                "plain": plain,
                "offload": offload,
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
