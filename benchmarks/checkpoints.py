"""Saving and restoring against plain file writes and reads of as many bytes on the same disk.

    python -m benchmarks.checkpoints [FOLDER] [--megabytes 400] [--rounds 5]

Prints medians, and the largest extra memory of this process beside its part of the state.
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

import gshard

gshard.virtual_devices(4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
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
    return state.replace(opt_state=(state.opt_state[0]._replace(mu=mu, nu=mu), *state.opt_state[1:]))


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


def read_raw(path: Path, into: np.ndarray) -> None:
    with path.open("rb") as file:
        file.readinto(into.data)


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
    raw = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for number in range(rounds + 1):
        with gshard.Checkpointer(folder / "run", keep_last=1) as checkpointer:
            times = {"write raw": timed(lambda: write_raw(folder / "raw", raw.data))}
            start = reset_peak()
            times["save, until it returns"] = timed(lambda: checkpointer.save(number, state))
            times["save, until it is a step"] = times["save, until it returns"] + timed(
                checkpointer.wait
            )
            save_peak = memory_peak() - start
            into = np.empty_like(raw)
            times["read raw"] = timed(lambda: read_raw(folder / "raw", into))
            del into
            start = reset_peak()
            like = (plan.abstract_state(), plan)
            times["restore"] = timed(
                lambda: jax.block_until_ready(checkpointer.restore(like=like).state)
            )
            restore_peak = memory_peak() - start
            times["restore, verify=False"] = timed(
                lambda: jax.block_until_ready(checkpointer.restore(like=like, verify=False).state)
            )
        if number:  # the first imports and warms up
            for name, seconds in times.items():
                note(name, seconds)
    print(f"{size / 1e6:,.0f} MB of state on {mesh.size} devices, {rounds} rounds, medians")
    for name, seconds in found.items():
        base = found["read raw" if "re" in name and "save" not in name else "write raw"]
        ratio = statistics.median(b / s for s, b in zip(seconds, base, strict=True))
        median = statistics.median(seconds)
        print(f"{name:26s} {median:7.2f} s {size / median / 1e6:8,.0f} MB/s  {ratio:5.2f} of raw")
    print(f"memory above the state's: save {save_peak / size:.2f} of it, "
          f"restore {restore_peak / size:.2f} (the new state is 1)")  # fmt: skip


if __name__ == "__main__":
    main()
