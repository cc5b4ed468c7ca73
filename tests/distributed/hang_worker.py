"""A training script in which one process does something else than the others at one step.

gshard launch --nproc_per_node 2 --virtual_devices 2 tests/distributed/hang_worker.py CASE FOLDER \
    [patient]

Waits are told after 2 seconds; with "patient" when gshard does it, and nothing ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import gshard
from gshard.distributed import watchdog

AT = 6  # the step of the fault


def tiny(rank: int, mesh: Any) -> None:
    import numpy as np
    import optax

    pair = {"w": np.ones(3, np.float32)}, optax.sgd(0.1)
    state, plan = gshard.shard_train_state(pair, mesh, "dp")
    step = gshard.make_train_step(lambda p, b: ((b["x"] @ p["w"] - 1) ** 2).mean(), plan)
    for i in range(5):
        if rank == 1 and i == 2:
            time.sleep(1000)
        state, _ = step(state, {"x": np.random.default_rng(rank).normal(size=(4, 3)) / 2})


def main(case: str, folder: str, patient: str = "") -> None:
    if not patient:
        watchdog.REMIND = 2.0
    gshard.distributed.initialize()
    import jax.numpy as jnp
    import numpy as np
    import optax

    rank = gshard.distributed.process_index()

    def loss_fn(params, batch):
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    def slow_to_trace(params, batch):
        if rank == 1:
            time.sleep(1000 if patient else 7)  # longer than hang_timeout
        return loss_fn(params, batch)

    mesh = gshard.make_mesh()
    if case == "tiny":  # XLA:CPU runs it in the thread that calls it
        return tiny(rank, mesh)
    print("starts", flush=True)
    if case == "starts late" and rank == 1:
        time.sleep(1000 if patient else 40)  # longer than Gloo waits for a connection
    params = {"w": np.zeros((16, 8), np.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-2)), mesh, "zero3", min_shard_size=0
    )
    step = gshard.make_train_step(slow_to_trace if case == "compiles" else loss_fn, plan)
    checkpointer = gshard.Checkpointer(folder)
    rng = np.random.default_rng(rank)
    for i in range(1, 121 if case == "slow save behind steps" else 11):
        x = rng.normal(size=(8, 16)).astype(np.float32)
        if rank == 1 and i == AT:
            if case == "smaller batch":
                x = x[:6]
            elif case == "batch is an error":
                x = x[:5]
        state, metrics = step(state, {"x": x, "y": x[:, :8]})
        float(metrics["loss"])
        print("step", i, flush=True)
        if i == 3:
            checkpointer.save(3, state)
            checkpointer.wait()
        if rank == 1 and i == AT:
            if case == "loader sleeps":
                time.sleep(1000)
            elif case == "break":
                break
            elif case == "sys.exit(0)":
                sys.exit(0)
            elif case == "os._exit(0)":
                os._exit(0)
            elif case == "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif case == "save":
                checkpointer.save(AT, state)
            elif case == "full_params":
                gshard.full_params(state)
            elif case == "save_safetensors":
                gshard.save_safetensors(state, f"{folder}/x.safetensors")
            elif case == "eval step":
                gshard.make_eval_step(loss_fn, plan)(state, {"x": x, "y": x[:, :8]})
            elif case == "barrier":
                gshard.distributed.barrier()
            elif case == "a sum":
                print(jnp.sum(state.params["w"]))
            elif case == "finally":
                try:
                    raise ValueError("no column x")
                finally:
                    checkpointer.save(AT, state)
        if case in ("disk does not answer", "slow save", "slow save behind steps") and i == AT:
            if rank == 1:
                delay_files(7 if case != "disk does not answer" and not patient else 1000)
            checkpointer.save(AT, state)
            if case != "slow save behind steps":
                checkpointer.wait()
        if case == "slow save behind steps":  # its processes are at different lines
            if rank == 0:
                time.sleep(0.1)
            else:
                time.sleep(0.1)
    checkpointer.close()
    print("trained", flush=True)


def delay_files(seconds: float) -> None:
    """Makes the files of a save take so long to be written, as on a slow disk."""
    from gshard.checkpoint.own_files import orbax

    files_of = orbax.files_of
    orbax.files_of = lambda *given: (time.sleep(seconds), files_of(*given))[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
