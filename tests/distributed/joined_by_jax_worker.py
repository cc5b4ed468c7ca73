"""A training script of which only JAX joins the processes; one makes a call alone at the end.

python tests/distributed/joined_by_jax_worker.py ADDRESS PROCESSES RANK [alone before]
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
import optax

import gshard
from gshard.distributed import watchdog

watchdog.REMIND = 2.0


def main(address: str, processes: int, rank: int, before: str = "") -> None:
    if before:
        gshard.distributed.initialize()  # which finds no others
        assert gshard.distributed.process_count() == 1
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, rank)
    assert not before or not gshard.distributed.initialize()
    assert gshard.distributed.process_count() == processes

    def loss_fn(params, batch):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    params = {"w": np.zeros((16, 8), np.float32)}
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-2)), mesh, "zero3", min_shard_size=0
    )
    step = gshard.make_train_step(loss_fn, plan)
    batch = {"x": np.ones((8, 16), np.float32)}
    for _ in range(3):
        state, metrics = step(state, batch)
        float(metrics["loss"])
    if rank == 1:
        time.sleep(6)
        gshard.full_params(state)
    gshard.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
