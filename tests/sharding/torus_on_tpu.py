"""Compiles a step for TPU slices that are not there; prints meshes and what moves, as JSON.

Run in a process of its own by `tests/sharding/test_torus.py`.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental import topologies
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target

SLICES: dict[str, dict[str, Any]] = {
    "tpu-v5e:2x4": {},
    "tpu-v5e:4x4": {},
    "tpu-v5p:2x2x2": {},
    "tpu-v5p:2x2x4": {},
    "tpu-7x:2x2x2": {},
    "tpu-v5e:4x4 in 2 replicas": {"replica": 2},
    "tpu-v5e:4x8 with an axis": {"extra": {"model": 2}},
    "tpu-v5e:4x4 and another": {},
    "tpu-v5e:4x4 and another in 2 replicas": {"replica": 2},
}


def loss(params: Any, x: jax.Array) -> jax.Array:
    return ((x @ params["a"]) @ params["b"]).mean()


def main() -> None:
    found = {}
    warnings.filterwarnings("ignore", "no parameter is sharded over mesh axes model")
    for name, options in SLICES.items():
        target = parse_target(name.split()[0])
        devices = target.described_devices()
        if "another" in name:
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=target.text.removeprefix("tpu-"), num_slices=2
            ).devices
        random.Random(0).shuffle(devices)
        mesh = gshard.make_mesh(devices=devices, **options)
        state = jax.eval_shape(
            lambda: TrainState.create(
                apply_fn=None,
                params={"a": jnp.zeros((512, 1024)), "b": jnp.zeros((1024, 512))},
                tx=optax.adam(1e-3),
            )
        )
        state, plan = gshard.shard_train_state(state, mesh, "p_g_os")
        rows = NamedSharding(mesh, plan.batch_spec)
        batch = jax.ShapeDtypeStruct((8 * len(devices), 512), jnp.float32, sharding=rows)
        step = gshard.make_train_step(loss, plan)
        try:
            report = gshard.audit(step, state, batch)
        except jax.errors.JaxRuntimeError as error:
            found[name] = {"mesh": dict(mesh.shape), "error": str(error)}
            continue
        along = [[d.coords[i] for d in line] for line, i in _lines(mesh)]
        found[name] = {
            "mesh": dict(mesh.shape),
            "in order": all(places == list(range(len(places))) for places in along),
            "nodes": report.nodes,
            "network": (report.network_bytes(), step.budget.network_bytes),
            "scattered": report.elements("reduce-scatter"),
            "promised": step.budget.elements("reduce-scatter"),
            "reduced": sum(
                row.elements or 0
                for row in report.collectives
                if row.kind == "all-reduce" and not row.scalar
            ),
        }
    print(json.dumps(found))


def _lines(mesh: Any) -> Iterator[tuple[Any, int]]:
    """For each axis of a torus the devices along it, and which coordinate is another for each."""
    for axis, name in enumerate(mesh.axis_names):
        if name[-2:] not in ("_x", "_y", "_z"):
            continue
        line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0]
        yield line, next(i for i in range(3) if line[0].coords[i] != line[1].coords[i])


if __name__ == "__main__":
    main()
