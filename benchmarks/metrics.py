"""What `gshard.Metrics` costs: the time of steps with it, as a ratio to that of steps without it.

    python -m benchmarks.metrics [--rounds 40] [--devices 8]

Both run in turn in one process, in blocks of 50 steps with a row every 10, and the ratio is that of
the rounds (`benchmarks.timing`). The step is as short as steps get, so that the cost shows.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from benchmarks.processes import on_cpu
from benchmarks.timing import in_turn, ratio

STEPS, EVERY = 50, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    on_cpu(options.devices)
    for width in (64, 512):
        params = {f"w{i}": jnp.ones((width, width)) / width for i in range(4)}
        state, plan = gshard.shard_train_state(
            (params, optax.adam(1e-3)), gshard.make_mesh(), "zero2", min_shard_size=0
        )
        step = gshard.make_train_step(loss_fn, plan)
        batch = gshard.shard_batch(np.ones((8 * options.devices, width), np.float32), plan)
        kept = [state]

        def run(has_metrics: bool, folder: str) -> None:
            opened = gshard.Metrics(folder, every=EVERY, writers=[]) if has_metrics else None
            with opened or nullcontext():
                for _ in range(STEPS):
                    kept[0], info = step(kept[0], batch)  # noqa: B023
                    if opened is not None:
                        opened.step(info)
            jax.block_until_ready(kept[0])  # noqa: B023

        with tempfile.TemporaryDirectory() as folder:
            times = in_turn(
                {
                    "without": lambda: run(False, folder),
                    "with": lambda: run(True, folder),
                },
                options.rounds,
            )
        found, each = ratio(times["with"], times["without"]), min(times["without"]) / STEPS
        print(f"4 layers of {width}: {1e3 * each:.2f} ms a step; with metrics x {found}")


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


if __name__ == "__main__":
    main()
