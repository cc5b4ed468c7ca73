"""Functions that `tests/distributed/launch/test_spawn.py` runs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import gshard


def leave():
    sys.exit(0)


def place(size: int) -> dict[str, object]:
    """Who this is, a sum over all, and a result larger than any pipe."""
    gshard.distributed.initialize()
    mesh = gshard.make_mesh()
    rank = gshard.distributed.process_index()
    ones = np.full((len(jax.local_devices()),), rank + 1.0, np.float32)
    rows = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, jax.P("shard")), ones
    )
    return {
        "rank": rank,
        "world_size": gshard.distributed.process_count(),
        "devices": jax.device_count(),
        "sum": float(jnp.sum(rows)),
        "large": jnp.full((size,), rank, jnp.int32),
    }


def rank_of_alone() -> tuple[int, int]:
    gshard.distributed.initialize()
    return gshard.distributed.process_index(), gshard.distributed.process_count()


def kind_of(params: dict[str, object]) -> tuple[str, int]:
    gshard.distributed.initialize()
    return type(params["w"]).__name__, gshard.distributed.process_count()


def fails(how: str, rank: int) -> str:
    """One rank fails, the others wait for it."""
    gshard.distributed.initialize()
    gshard.distributed.barrier()
    if gshard.distributed.process_index() == rank:
        if how == "raise":
            raise KeyError("of rank 1")
        if how == "exit":
            sys.exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "result":
            return lambda: "cannot be sent"  # type: ignore[return-value]
    gshard.distributed.barrier()
    return "never"


def waits(seconds: float) -> None:
    time.sleep(seconds)


class NeedsTwoError(Exception):
    """Which a copy of its message cannot make again."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raises_what_needs_two() -> None:
    raise NeedsTwoError("one", "other")


def mixed(extra: object) -> dict:
    """No tree to JAX; and something that writes for ever."""
    subprocess.Popen(["yes"], stdout=2)
    return {1: jnp.ones(3), "b": extra, "key": jax.random.key_data(jax.random.key(0))}


def lags_behind() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("and a thread goes on")


def one_fails_others_sleep(deaf: str) -> None:
    """The others would notice nothing, and do not hear SIGTERM once the file `deaf` is there."""
    if os.environ["GSHARD_PROCESS_ID"] == "1":
        while not os.path.exists(deaf):
            time.sleep(0.02)
        raise ValueError("of rank 1")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(deaf, "w").close()
    time.sleep(1000)


def steps() -> None:
    gshard.distributed.initialize()
    for step in range(10**6):
        gshard.distributed.barrier()
        if step == 0:
            print("first step", flush=True)
        time.sleep(0.005)


def until_told() -> None:
    gshard.distributed.initialize()
    seen = 0

    def last() -> None:
        print(f"saved at {seen}", flush=True)

    for seen in gshard.distributed.until_preempted(range(10**6), last):
        gshard.distributed.barrier()
        if seen == 0:
            print("first step", flush=True)
        time.sleep(0.005)


def no_sync(rows_of_all: list[np.ndarray]) -> np.ndarray:
    """Losses of steps of which every third reduces gradients; each rank takes its part of rows."""
    from tests.distributed.launch.test_spawn import train

    gshard.distributed.initialize()
    rank, size = gshard.distributed.process_index(), gshard.distributed.process_count()
    return np.array(train([np.array_split(rows, size)[rank] for rows in rows_of_all]))


if __name__ == "__main__":  # as a program of its own, to be killed
    gshard.distributed.spawn(globals()[sys.argv[1]], nprocs=2, virtual_devices=1)
