"""One process of `tests/distributed/test_elastic.py`; `gshard launch` starts it on each host.

    -m tests.distributed.elastic_worker FOLDER STEPS PAUSE

It trains to a step, from the newest that was saved, and writes each loss with the number of devices
and of micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import optax

import gshard

EXAMPLES, BATCH, AT_A_TIME, WIDTH = 240, 24, 3, 64


def train(
    folder: Path,
    steps: int,
    tell: Callable[[dict[str, Any]], None],
    until_preempted: Callable[..., Iterable[Any]] = lambda batches, last: batches,
) -> None:
    """Trains to a step, and tells of each."""
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    shapes = {"in": (WIDTH, WIDTH), "bias": (WIDTH - 1,), "out": (WIDTH - 1, WIDTH)}
    params = {k: random.normal(size=x).astype(np.float32) / 8 for k, x in shapes.items()}
    data = {"x": random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)}

    def loss_fn(params, batch):
        x = batch["x"]
        hidden = jnp.tanh((x @ params["in"])[:, :-1] + params["bias"])
        return ((hidden @ params["out"] - x) ** 2).mean()

    state, plan = gshard.shard_train_state(
        (params, optax.adamw(1e-2, eps=1e-5)), gshard.make_mesh(), "p_g_os"
    )
    loader = gshard.DataLoader(data, BATCH, plan, num_epochs=None)
    micro_batches = loader.micro_batches(AT_A_TIME)
    step = gshard.make_train_step(loss_fn, plan, micro_batches=micro_batches)
    with gshard.Checkpointer(folder / "steps", keep_last=2) as checkpointer:
        if checkpointer.latest_step() is not None:
            restored = checkpointer.restore(like=state)
            state = restored.state
            loader.load_state_dict(restored.data_state)

        def save() -> None:
            checkpointer.save(int(state.step), state, data_state=loader.state_dict())
            checkpointer.wait()

        for batch in until_preempted(loader, save):
            state, metrics = step(state, batch)
            number = int(state.step)
            devices = jax.device_count()
            tell({"step": number, "loss": float(metrics["loss"]), "on": [devices, micro_batches]})
            if number % 4 == 0:
                save()
            if number == steps:
                break


def main(folder: Path, steps: int, pause: float) -> None:
    gshard.distributed.initialize()
    rank = gshard.distributed.process_index()
    starts = int(os.environ["GSHARD_RESTARTS"])
    name = f"{starts}-{rank}"
    if starts == 1:  # a host is missing: its launcher takes seconds to start on a busy machine
        pause *= 5

    def tell(found: dict[str, Any]) -> None:
        with (folder / f"{name}.jsonl").open("a") as file:
            print(json.dumps(found), file=file)
        time.sleep(pause)

    train(folder, steps, tell, gshard.distributed.until_preempted)


if __name__ == "__main__":
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
