"""A training in one process or many that stops on SIGTERM, and resumes later.

    python examples/train.py
    gshard launch --nproc_per_node 2 --virtual_devices 2 examples/train.py --steps 50

Parameters, gradients and optimizer state are sharded over all devices. Each process makes its own
examples. After SIGTERM all processes save at the same step and exit, and the next start resumes
from there; after a kill it resumes from the newest complete step. With several machines, `--output`
is a folder that all of them see.
"""

from __future__ import annotations

import argparse
import sys
import time

import gshard

gshard.distributed.initialize()  # before anything else uses JAX

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

EXAMPLES, WIDTH = 64, 256  # of the batch of all processes, of a layer


class Net(nnx.Module):
    """Three layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_fn(model: Net, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean squared error over the given examples."""
    x, y = batch
    return jnp.mean((model(x)[:, 0] - y) ** 2)


def own_rows(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of batch `step`: the same batch, however many processes share it."""
    x = np.random.default_rng(step).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    own = np.array_split(x, gshard.distributed.process_count())[gshard.distributed.process_index()]
    return own, np.sin(own.sum(axis=1))


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

    if EXAMPLES % jax.device_count():
        raise SystemExit(f"{EXAMPLES} examples do not divide over {jax.device_count()} devices")
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(
        Net(nnx.Rngs(0)), optax.adamw(1e-3), "p_g_os", segment_size=2**14
    )
    with gshard.Checkpointer(args.output, keep_last=3) as checkpointer:
        if checkpointer.latest_step() is not None:
            checkpointer.restore(like=(model, optimizer))
        start = int(optimizer.step)
        say(
            f"from step {start}, {jax.device_count()} devices, "
            f"{gshard.distributed.process_count()} processes"
        )

        def save() -> None:
            checkpointer.wait()
            step = int(optimizer.step)
            if step not in checkpointer.all_steps():  # SIGTERM came right after it was saved
                checkpointer.save(step, (model, optimizer))  # is written while training continues

        def save_and_wait() -> None:
            save()
            checkpointer.wait()
            say(f"saved after step {int(optimizer.step)}")

        loss = None
        for step in gshard.distributed.until_preempted(
            range(start, args.steps), last=save_and_wait
        ):
            loss = model.backward(loss_fn, own_rows(step))
            optimizer.step()
            optimizer.clear_grad()
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save()
            time.sleep(args.pause)
    say("nothing left to do" if loss is None else f"done: loss {float(loss):.4f}")


def say(text: str) -> None:
    """Once for all processes."""
    if gshard.distributed.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
