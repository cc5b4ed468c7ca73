"""Trains in one process or many, stops on SIGTERM, and resumes later.

    python examples/train.py
    gshard launch --nproc_per_node 2 --virtual_devices 2 examples/train.py --steps 50

Parameters, gradients and optimizer state are sharded over all devices, whose number must divide 64.
After SIGTERM all processes save at the same step and exit, and the next start resumes from there;
after a kill it resumes from the newest complete step. With several machines, `--output` is a folder
that all of them see.
"""

from __future__ import annotations

import argparse
import sys
import time

import gshard

gshard.distributed.initialize()  # before anything else uses JAX

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

BATCH, WIDTH = 64, 256  # examples of the batch of all processes, width of a layer
MODEL = nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH), nn.relu, nn.Dense(1)])


def init() -> TrainState:
    """The train state; gshard creates it sharded."""
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean squared error of the batch."""
    return jnp.mean((MODEL.apply({"params": params}, batch["x"])[:, 0] - batch["y"]) ** 2)


def main() -> None:
    """Trains to the last step, from the last one that was saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="in all, over every start")
    parser.add_argument("--save_every", type=int, default=50, help="steps")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after a step, to watch it"
    )
    parser.add_argument("--output", default="output", help="a folder for checkpoints, or gs://...")
    args = parser.parse_args()
    if args.save_every < 1:
        parser.error(f"--save_every {args.save_every} must be at least 1")

    state, plan = gshard.shard_train_state(init, gshard.make_mesh(), "zero3")
    step = gshard.make_train_step(loss_fn, plan)
    x = np.random.default_rng(0).normal(size=(64 * BATCH, WIDTH)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(axis=1))}  # each process reads its own examples
    loader = gshard.DataLoader(data, BATCH, plan, seed=0, num_epochs=None)

    number, metrics = 0, None
    with gshard.Checkpointer(args.output, keep_last=3) as checkpointer:
        if checkpointer.latest_step() is not None:
            restored = checkpointer.restore(like=state)
            state, number = restored.state, restored.step
            loader.load_state_dict(restored.data_state)
        say(
            f"from step {number}, {jax.device_count()} devices, "
            f"{gshard.distributed.process_count()} processes"
        )

        def save() -> None:  # writes while training continues
            checkpointer.save(number, state, data_state=loader.state_dict())

        def save_and_wait() -> None:
            save()
            checkpointer.wait()
            say(f"saved after step {number}")

        steps = range(number + 1, args.steps + 1)
        batches = gshard.distributed.until_preempted(loader, last=save_and_wait)
        for number, batch in zip(steps, batches, strict=False):
            state, metrics = step(state, batch)
            if number % args.save_every == 0 or number == args.steps:
                save()
            time.sleep(args.pause)
    say("nothing left to do" if metrics is None else f"done: loss {float(metrics['loss']):.4f}")


def say(text: str) -> None:
    """Once for all processes."""
    if gshard.distributed.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
