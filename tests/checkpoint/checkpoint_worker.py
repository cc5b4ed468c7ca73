"""Trains, saves every step and is killed; `soak_checkpoints.py` starts it.

    checkpoint_worker.py RUN LEVEL STEPS POINT RANK

RUN is a folder: the checkpoints are in `RUN/steps`, and `RUN/record` says what they must be. Every
start first compares them with the record, then goes on from the newest. POINT is where the process
of this rank kills itself, or `none`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import gshard
from gshard._util.pytree import flatten
from gshard.sharding.host_arrays import full_on_host

KEEP, ROWS, ARMED_AFTER = 2, 8, 3  # ARMED_AFTER: saves, so that there is an old step to delete
SHAPES = {"first": (7, 300), "second": (300, 301), "scale": ()}
LOCK = ".gshard_lock"
fsync = os.fsync  # the record's own, which kills nobody


def loss_fn(params, batch):
    hidden = jax.numpy.tanh(batch["x"] @ params["first"])
    return ((hidden @ params["second"] * params["scale"]) ** 2).mean()


def fresh(level: str) -> Any:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
    tx = optax.adamw(1e-3)
    return gshard.shard_train_state((params, tx), gshard.make_mesh(), level, min_shard_size=0)


def batch(step: int) -> dict[str, np.ndarray]:
    """This process's rows."""
    x = np.random.default_rng((1, step)).normal(size=(ROWS, 7)).astype(np.float32)
    each = ROWS // gshard.distributed.process_count()
    return {"x": x[gshard.distributed.process_index() * each :][:each]}


def checksum(state: Any, plan: gshard.Plan) -> str:
    """Of every bit of the state's logical values, whatever their mesh."""
    paths, leaves, _ = flatten(full_on_host(plan.kind.split(state), plan.layouts))
    total = hashlib.sha256()
    for path, leaf in sorted(zip(paths, leaves, strict=True)):
        total.update(f"{path} {leaf.shape} {leaf.dtype}".encode() + np.asarray(leaf).tobytes())
    return total.hexdigest()


class Record:
    """What was saved: every step's checksum, and which steps were known to be on the disk."""

    def __init__(self, path: Path):
        self._path = path
        self.checksums: dict[int, str] = {}
        self.committed = -1
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if "checksum" in entry:
                self.checksums[entry["step"]] = entry["checksum"]
            else:
                self.committed = max(self.committed, entry["step"])

    def note(self, **entry: Any) -> None:
        """One line, on the disk, of the first process."""
        if gshard.distributed.process_index() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                fsync(file.fileno())


def check(checkpointer: gshard.Checkpointer, record: Record, state: Any, plan: Any) -> Any:
    """The state of the newest step, once every step there is what the record says."""
    steps = checkpointer.all_steps()
    newest = max(steps, default=-1)
    assert newest >= record.committed, f"{steps}, but {record.committed} was committed"
    for step in steps:
        assert not checkpointer.verify(step), f"{step}: {checkpointer.verify(step)}"
        state = checkpointer.restore(step, like=(state, plan)).state
        assert checksum(state, plan) == record.checksums[step], f"step {step} has other values"
    return newest, state


def refuse_debris(directory: Path, number: int) -> None:
    """Before a save the first process, which makes the folders, sees complete steps alone."""
    if gshard.distributed.process_index() == 0:
        there = set(os.listdir(directory))
        steps = sorted(int(name) for name in there - {LOCK} if name.isdigit())
        assert there - {LOCK} == {str(x) for x in steps}, f"debris: {there}"
        assert steps[-1] == number - 1 and len(steps) <= KEEP, there


def train(run: Path, level: str, steps: int, arm: Callable[[], None]) -> None:
    directory, record = run / "steps", Record(run / "record")
    state, plan = fresh(level)
    step = gshard.make_train_step(loss_fn, plan)
    with gshard.Checkpointer(directory, keep_last=KEEP) as checkpointer:
        newest, state = check(checkpointer, record, state, plan)
        print(f"goes on from {newest}", flush=True)
        for number in range(newest + 1, newest + 1 + steps):
            state, _ = step(state, batch(number))
            total = checksum(state, plan)
            checkpointer.wait()
            if number > newest + 1:
                record.note(step=number - 1)
                refuse_debris(directory, number)
            if number == newest + 1 + ARMED_AFTER:
                arm()
            record.note(step=number, checksum=total)
            checkpointer.save(number, state)
    record.note(step=newest + steps)
    print("all steps", flush=True)


def arming(point: str) -> Callable[[], None]:
    """A function after which this process kills itself at a point of the next saves.

    `write MS`: milliseconds after the save has begun. `CALL N`: before the Nth such call.
    """
    call, number = point.split()
    if call == "write":
        return lambda: threading.Timer(float(number) / 1000, kill_itself).start()
    name, this = CALLS[call]
    real, left, lock = getattr(os, name), [int(number)], threading.Lock()

    def counting(*arguments, **options):
        if this(*map(str, arguments)):
            with lock:
                left[0] -= 1
                if not left[0]:
                    kill_itself()
        return real(*arguments, **options)

    return lambda: setattr(os, name, counting)


# Which calls of `os` a point names: the function, and whether a call is meant.
CALLS: dict[str, tuple[str, Callable[..., bool]]] = {
    "mkdir": ("mkdir", lambda path, *_: ".saving" in path),
    "fsync": ("fsync", lambda *_: True),
    # Of the directory: after a commit, and after the rename of what is deleted.
    "renamed": ("fsync", lambda number: os.readlink(f"/proc/self/fd/{number}").endswith("/steps")),
    "manifest": ("rename", lambda old, new: "/manifests/" in new),
    "commit": ("rename", lambda old, new: old.endswith(".saving")),
    "delete": ("rename", lambda old, new: new.endswith(".deleted")),
    "unlink": ("unlink", lambda *_: True),
    "rmdir": ("rmdir", lambda *_: True),
}


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """As long as every write beyond so many bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saves_on_a_bad_disk(directory: str) -> list[str]:
    """What failed saves of step 2 say, where the last process cannot write."""
    gshard.distributed.initialize()
    state, _ = fresh("p_g_os")
    last, said = gshard.distributed.process_index() == gshard.distributed.process_count() - 1, []
    with gshard.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        for call in (checkpointer.wait, lambda: checkpointer.save(3, state)):
            checkpointer.wait()
            with files_end_at(50_000) if last else contextlib.nullcontext():
                try:
                    checkpointer.save(2, state)
                    call()
                except gshard.SaveFailedError as error:
                    said.append(str(error))
        checkpointer.save(2, state)
        checkpointer.save(3, state)
    return said


def main(run: str, level: str, steps: str, point: str, rank: str) -> None:
    gshard.distributed.initialize()
    kills = point != "none" and gshard.distributed.process_index() == int(rank)
    train(Path(run), level, int(steps), arming(point) if kills else lambda: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
