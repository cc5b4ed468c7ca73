"""A script that saves and ends, in one or several processes (`tests/checkpoint/test_faults.py`).

saves_and_ends.py DIRECTORY HOW [KILLS ...]
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import gshard
from tests.checkpoint.checkpoint_worker import batch, checksum, fresh, fsync, loss_fn

STEPS = 12


def ends(directory: str, how: str) -> None:
    """With a save on its way, of which nobody hears again."""
    state, _ = fresh("p_g_os")
    checkpointer = gshard.Checkpointer(directory)
    if how == "saves at exit":
        atexit.register(checkpointer.save, 1, state)
        return
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    if how == "raises":
        raise ValueError("a mistake of the user's")
    if how == "is interrupted":
        signal.raise_signal(signal.SIGINT)
    if how == "exits":
        sys.exit(7)
    if how == "forks":  # as loaders of data do
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join(20)
        child.kill()
        sys.exit(child.exitcode is None)
    if how == "fails":
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        checkpointer.save(3, state)
        time.sleep(2)


def trains(folder: Path, kills: list[int]) -> None:
    """Twelve steps, from the newest that is there; the last rank is killed in those of `kills`."""
    restarts, last = int(os.environ["GSHARD_RESTARTS"]), gshard.distributed.process_count() - 1
    state, plan = fresh("p_g_os")
    step = gshard.make_train_step(loss_fn, plan)
    with (
        gshard.Checkpointer(folder / "steps", keep_last=2) as checkpointer,
        (folder / "losses").open("a") as losses,
    ):
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(like=state).state
        for number in range((checkpointer.latest_step() or 0) + 1, STEPS + 1):
            state, metrics = step(state, batch(number))
            total = checksum(state, plan)
            if gshard.distributed.process_index() == 0:
                entry = [number, [metrics["loss"].item().hex(), total]]
                losses.write(json.dumps(entry) + "\n")
                losses.flush()
                fsync(losses.fileno())
            checkpointer.save(number, state)
            if gshard.distributed.process_index() == last and kills[restarts : restarts + 1] == [
                number
            ]:
                os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, how: str, *kills: str) -> None:
    gshard.distributed.initialize()
    if how == "trains":
        trains(Path(directory), [int(kill) for kill in kills])
    else:
        ends(directory, how)


if __name__ == "__main__":
    main(*sys.argv[1:])
