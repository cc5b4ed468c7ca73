"""Probes that run in a process of their own, since they may hang or abort; each prints JSON.

`main` is called with the name of a function and its arguments.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gshard._util.errors import GShardError, GShardWarning
from gshard.distributed.initialize import initialize, process_index
from gshard.distributed.launch.spawn import spawn
from gshard.sharding.host_arrays import full_params
from gshard.sharding.level import LEVELS
from gshard.sharding.mesh import make_mesh, virtual_devices
from gshard.train.shard_train_state import shard_train_state
from gshard.train.train_step import make_train_step

_STEPS = 2


def main(name: str, arguments: str) -> None:
    """Runs a probe; anything that libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore", GShardWarning)
    try:
        found = PROBES[name](**json.loads(arguments))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".removesuffix(": ")}
    with out:
        json.dump(found, out)


def devices() -> dict[str, Any]:
    """Returns the devices that JAX uses, their memory in bytes, and the mesh over them."""
    try:
        found = jax.local_devices()
    except AssertionError:  # all that JAX says then
        raise RuntimeError("JAX has no plugin for what JAX_PLATFORMS names") from None
    mesh = make_mesh()
    inside = set(mesh.devices.flat)
    stats = [device.memory_stats() or {} for device in found]
    return {
        "devices": [
            {"platform": d.platform, "kind": d.device_kind, "memory": s.get("bytes_limit")}
            for d, s in zip(found, stats, strict=True)
        ],
        "mesh": dict(mesh.shape),
        "idle": [str(d) for d in jax.devices() if d not in inside],
    }


def numbers(virtual: int) -> dict[str, Any]:
    """Returns the largest difference in parameters of each level from single-device training.

    Args:
      virtual: number of virtual CPU devices to make; 0 uses the existing devices.
    """
    if virtual:
        with suppress(GShardError):  # XLA_FLAGS says how many
            virtual_devices(virtual)
    here = jax.local_devices()
    mesh = make_mesh(devices=here)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    params = {"in": normal(64, 48) / 8, "bias": normal(48), "out": normal(48, 16) / 7}
    batch = {"x": normal(4 * len(here), 64), "y": normal(4 * len(here), 16)}
    tx = optax.sgd(0.1, momentum=0.9)
    # Otherwise TPUs, and GPUs with TF32, round the operands of a product.
    with jax.default_matmul_precision("highest"):
        wanted = _on_one_device(params, tx, batch)
        found = {}
        for level in LEVELS:
            state, plan = shard_train_state((params, tx), mesh, LEVELS[level], min_shard_size=0)
            step = make_train_step(_loss, plan)
            for _ in range(_STEPS):
                state, _ = step(state, batch)
            got = full_params(state)
            found[level] = max(
                float(np.abs(np.asarray(got[name]) - wanted[name]).max()) for name in params
            )
    return {"levels": found, "devices": len(here), "platform": here[0].platform}


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def _on_one_device(params: Any, tx: Any, batch: Any) -> dict[str, np.ndarray]:
    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(_STEPS):
        params, state = step(params, state)
    return jax.tree.map(np.asarray, params)


def gloo(patience: int) -> dict[str, Any]:
    """Returns the sum of 1 and 2 that two new processes compute; they meet within `patience` s."""
    sums = spawn(_sum_over_processes, nprocs=2, virtual_devices=1, initialization_timeout=patience)
    return {"sums": sums}


def _sum_over_processes() -> float:
    initialize()
    mesh = make_mesh()
    own = np.full((1,), process_index() + 1, np.float32)
    return float(_sum(mesh)(jax.make_array_from_process_local_data(_rows(mesh), own)))


def nccl(elements: int = 2**24) -> dict[str, Any]:
    """Returns the sum over all local devices, each with its own number, and its transfer rate.

    Args:
      elements: number of elements of each device, of 4 bytes each.
    """
    mesh = make_mesh(devices=jax.local_devices())
    count = mesh.size
    rows = np.broadcast_to(np.arange(1, count + 1, dtype=np.float32)[:, None], (count, elements))
    given, add = jax.device_put(rows, _rows(mesh)), _sum(mesh)
    total = jax.block_until_ready(add(given))
    began = time.perf_counter()
    for _ in range(5):
        jax.block_until_ready(add(given))
    seconds = (time.perf_counter() - began) / 5
    wanted = count * (count + 1) / 2
    right = all((np.asarray(part.data) == wanted).all() for part in total.addressable_shards)
    # Bytes that a ring transfers in and out of each device.
    moved = 2 * (count - 1) / count * 4 * elements
    return {"right": bool(right), "devices": count, "bytes_per_second": moved / seconds}


def _rows(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    return jax.NamedSharding(mesh, jax.P(mesh.axis_names))


def _sum(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that sums rows over several devices; every device gets the sum."""
    whole = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda x: x.sum(0), out_shardings=whole)


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "devices": devices,
    "numbers": numbers,
    "gloo": gloo,
    "nccl": nccl,
}
