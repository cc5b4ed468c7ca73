"""A script whose save takes long, and of which one process fails meanwhile.

slow_save.py SECONDS RANK
"""

from __future__ import annotations

import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

import gshard
from gshard.checkpoint import orbax


def main(seconds: float, failing: int) -> None:
    gshard.distributed.initialize()
    write = orbax.write

    def slowly(step, arrays):
        finish = write(step, arrays)
        return lambda: (time.sleep(seconds), finish())[1]

    orbax.write = slowly  # a slow disk
    params = {"w": jnp.ones((64, 64))}
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-3)), gshard.make_mesh(), "os", min_shard_size=0
    )
    gshard.Checkpointer("steps").save(1, state)
    if gshard.distributed.process_index() == failing:
        raise RuntimeError("a mistake of the user's")
    step = gshard.make_train_step(lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), plan)
    while True:
        state, metrics = step(state, np.ones((8, 64), np.float32))
        float(metrics["loss"])


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
