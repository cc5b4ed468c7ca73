"""Saving and restoring against plain file writes and reads of as many bytes on the same disk.

    python -m benchmarks.checkpoints [FOLDER] [--megabytes 400] [--rounds 5]

Prints medians, and the largest memory of this process in addition to its local shards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gshard

gshard.virtual_devices(4)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

BLOCK = 2**22


def make_state(megabytes: int) -> TrainState:
    """Parameters and moments of so many megabytes in all, random."""
    layers, width = 12, int((megabytes * 1e6 / (12 * 12)) ** 0.5) // 4 * 4
    keys = jax.random.split(jax.random.key(0), layers)
    params = {f"layer_{i}": jax.random.normal(k, (width, width)) for i, k in enumerate(keys)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    mu = jax.tree.map(lambda x: x * 0.1, params)
    return state.replace(
        opt_state=(state.opt_state[0]._replace(mu=mu, nu=mu), *state.opt_state[1:])
    )


def memory_peak() -> int:
    """Bytes of this process's memory at their highest since the last call of `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> int:
    """Forgets the peak; the bytes that are in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_peak()


def timed(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def write_raw(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        for i in range(0, len(data), BLOCK):
            file.write(data[i : i + BLOCK])
        file.flush()
        os.fsync(file.fileno())


def read_raw(path: Path, into: bytearray) -> None:
    with path.open("rb") as file:
        file.readinto(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=None, help="on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        measure(folder, given.megabytes, given.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, megabytes: int, rounds: int) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(make_state(megabytes), mesh, "p_g_os")
    jax.block_until_ready(state)
    size = sum(plan.bytes_per_device.values()) * mesh.size
    seen = [one_round(folder, number, size, state, plan) for number in range(rounds + 1)]
    seen = seen[1:]  # the first imports, and warms up
    print(f"{size / 1e6:,.0f} MB of state on {mesh.size} devices, {rounds} rounds, medians")
    for name, base in BASES.items():
        seconds = statistics.median(x[name] for x in seen)
        ratio = statistics.median(x[base] / x[name] for x in seen)
        speed = size / seconds / 1e6
        print(f"{name:30s} {seconds:7.2f} s {speed:8,.0f} MB/s  {ratio:5.2f} of raw")
    save, restore = (max(x[name] for x in seen) / size for name in ("save memory", "read memory"))
    print(f"memory above the state's: save {save:.2f} of it, restore {restore:.2f} "
          "(the new state is 1)")  # fmt: skip


BASES = {
    "write raw": "write raw",
    "save, until it returns": "write raw",
    "save, until it is a step": "write raw",
    "read raw": "read raw",
    "restore": "read raw",
    "restore, verify=False": "read raw",
    "local save, until it returns": "write raw",
    "local save, until it is a step": "write raw",
    "local restore": "read raw",
    "plain Orbax, save": "write raw",
    "plain Orbax, restore": "read raw",
}


def one_round(folder: Path, number: int, size: int, state: Any, plan: Any) -> dict[str, float]:
    """Seconds of each, and bytes of memory beyond those that were in use."""
    found = raw_times(folder / "raw", np.random.default_rng(number).bytes(size))
    like = (plan.abstract_state(), plan)
    with gshard.Checkpointer(folder / "run", keep_last=1) as checkpointer:
        start = reset_peak()
        first = timed(lambda: checkpointer.save(number, state))
        found["save, until it returns"] = first
        found["save, until it is a step"] = first + timed(checkpointer.wait)
        found["save memory"] = memory_peak() - start
        for name, verify in {"restore": True, "restore, verify=False": False}.items():
            start = reset_peak()
            found[name] = timed(lambda v=verify: restore(checkpointer, like, v))
            found["read memory"] = memory_peak() - start
    found |= local_times(folder, number, state, like)
    return found | orbax_times(folder / "orbax", state)


def local_times(folder: Path, number: int, state: Any, like: Any) -> dict[str, float]:
    """Of a local folder on the same disk."""
    how = {"every": 10**9, "local": folder / "local", "local_every": 1}
    checkpointer = gshard.Checkpointer(folder / "run", writes=False, **how)
    returned = timed(lambda: checkpointer.save(number + 1, state))
    complete = returned + timed(checkpointer.wait)
    restored = timed(lambda: restore(checkpointer, like, True))
    checkpointer.close()
    return {
        "local save, until it returns": returned,
        "local save, until it is a step": complete,
        "local restore": restored,
    }


def orbax_times(folder: Path, state: Any) -> dict[str, float]:
    """Of Orbax without gshard, which compares no checksums."""
    import orbax.checkpoint as ocp

    shutil.rmtree(folder, ignore_errors=True)
    tree = {str(i): x for i, x in enumerate(jax.tree.leaves(state)) if np.size(x)}
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with ocp.StandardCheckpointer() as checkpointer:

        def save() -> None:
            checkpointer.save(folder, tree)
            checkpointer.wait_until_finished()

        saved = timed(save)
        read = timed(lambda: jax.block_until_ready(checkpointer.restore(folder, abstract)))
    return {"plain Orbax, save": saved, "plain Orbax, restore": read}


def raw_times(path: Path, data: bytes) -> dict[str, float]:
    into = bytearray(len(data))
    return {
        "write raw": timed(lambda: write_raw(path, memoryview(data))),
        "read raw": timed(lambda: read_raw(path, into)),
    }


def restore(checkpointer: gshard.Checkpointer, like: Any, verify: bool) -> None:
    jax.block_until_ready(checkpointer.restore(like=like, verify=verify).state)


if __name__ == "__main__":
    main()
