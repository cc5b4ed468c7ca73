"""One process of `tests/distributed/test_two_hosts.py`; `gshard launch` starts it on each host.

    -m tests.distributed.two_hosts_worker numbers FOLDER LEVEL
    -m tests.distributed.two_hosts_worker steps FOLDER [--few-after-restart]

`numbers` trains, each process on rows of its own, and saves what it saw, by rank. `steps` trains
until it is told to stop, and writes the step at which it did.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gshard

STEPS, ROWS, WIDTH = 4, 16, 64
MANY, FEW, PAUSE = 100_000, 5, 0.05  # steps, steps, seconds


def start(level: str, mesh: Any) -> tuple[Any, Any]:
    """A state and its step: two layers, a bias that does not divide, a scalar."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    random = np.random.default_rng(0)
    params = {
        "in": random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8,
        "bias": np.zeros(WIDTH - 1, np.float32),
        "out": random.normal(size=(WIDTH - 1, WIDTH)).astype(np.float32) / 8,
        "scale": np.ones((), np.float32),
    }

    def loss_fn(params, x):
        hidden = jnp.tanh((x @ params["in"])[:, :-1] + params["bias"])
        return ((hidden @ params["out"] * params["scale"] - x) ** 2).mean()

    state, plan = gshard.shard_train_state((params, optax.adamw(1e-2, eps=1e-5)), mesh, level)
    return state, gshard.make_train_step(loss_fn, plan, micro_batches=2)


def rows(i: int, rank: int, processes: int) -> Any:
    """One process's rows of batch `i`."""
    import numpy as np

    batch = np.random.default_rng(100 + i).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return np.split(batch, processes)[rank]


def train(level: str, mesh: Any, rank: int, processes: int) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the full parameters at the end."""
    state, step = start(level, mesh)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, rows(i, rank, processes))
        losses.append(float(metrics["loss"]))
    return losses, gshard.full_params(state)


def numbers(folder: Path, level: str) -> None:
    import jax
    import numpy as np

    rank, processes = gshard.distributed.process_index(), gshard.distributed.process_count()
    losses, params = train(level, gshard.make_mesh(), rank, processes)
    found = {f"params/{path}": leaf for path, leaf in params.items()}
    counts = [len(jax.local_devices()), len(jax.devices())]
    np.savez(folder / f"{rank}.npz", losses=losses, devices=counts, **found)


def steps(folder: Path, *options: str) -> None:
    rank, processes = gshard.distributed.process_index(), gshard.distributed.process_count()
    again = int(os.environ["GSHARD_RESTARTS"])
    count = FEW if again and "--few-after-restart" in options else MANY
    state, step = start("p_g_os", gshard.make_mesh())
    done = 0

    def stopped() -> None:
        (folder / f"{rank}.stopped").write_text(str(done))

    for i in gshard.distributed.until_preempted(range(count), stopped):
        state, metrics = step(state, rows(i, rank, processes))
        metrics["loss"].block_until_ready()
        done += 1
        if done == FEW:
            (folder / f"{rank}.running-{again}").write_text(str(os.getpid()))
        time.sleep(PAUSE)


if __name__ == "__main__":
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    gshard.distributed.initialize()
    {"numbers": numbers, "steps": steps}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
