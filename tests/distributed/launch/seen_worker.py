"""A training that the tests look at from outside: it saves, resumes, and fails as it is told.

seen_worker.py STEPS [bad STEP] [fail STEP] [kill STEP ...] [hang STEP]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import optax

import gshard


def main(steps: int, *what: str) -> None:
    gshard.distributed.initialize()
    at = {name: [int(x) for x in what[what.index(name) + 1 :]] for name in what if name.isalpha()}
    rank, restarts = gshard.distributed.process_index(), int(os.environ["GSHARD_RESTARTS"])
    params = {"w": np.ones((16, 8), np.float32), "b": np.zeros(8, np.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.01)), gshard.make_mesh(), "zero3", min_shard_size=0
    )

    def loss_fn(p, b):  # what is bad spoils one entry of `w`, which the last device stores
        return ((b["x"] @ p["w"] + p["b"]) ** 2).mean() + (p["w"][15, 7] * b["bad"]).mean()

    step = gshard.make_train_step(loss_fn, plan, max_bad_steps=5)
    with gshard.Checkpointer("steps") as checkpointer:
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(like=state).state
        for number in range(int(state.step) + 1, steps + 1):
            bad = np.full(8, np.nan if number in at.get("bad", []) else 0.0, np.float32)
            state, _ = step(state, {"x": np.ones((8, 16), np.float32), "bad": bad})
            if number % 4 == 0:
                checkpointer.save(int(state.step), state)
                checkpointer.wait()
            if number in at.get("fail", []):
                raise RuntimeError(f"the data of step {number} are bad")
            if number in at.get("kill", [])[restarts : restarts + 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            if number in at.get("hang", []) and rank == 0:
                time.sleep(1000)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
