"""Saving and restoring against plain file writes and reads of as many bytes on the same disk.

    python -m benchmarks.checkpoints [FOLDER] [--megabytes 400] [--rounds 5]
        [--store s3://BUCKET/PATH] [--torch-python PYTHON]

Prints medians, and the largest memory of this process in addition to its local shards. With a store
the same there, against its client's own upload and download of one file; with a Python that has
PyTorch, `torch.distributed.checkpoint` on the same disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gshard
from benchmarks.processes import on_cpu

on_cpu(4)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from gshard.checkpoint.bucket import Bucket  # noqa: E402

BLOCK, LAYERS = 2**22, 12


def width_of(megabytes: int) -> int:
    """The rows and columns of a layer, of which there are three arrays."""
    return int((megabytes * 1e6 / (12 * LAYERS)) ** 0.5) // 4 * 4


def make_state(megabytes: int) -> TrainState:
    """Parameters and moments of so many megabytes in all, random."""
    width = width_of(megabytes)
    keys = jax.random.split(jax.random.key(0), LAYERS)
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
    parser.add_argument("--store", help="an address in an object store, for other rows")
    parser.add_argument("--torch-python", help="a Python with PyTorch, for other rows")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        others = []
        if given.torch_python:
            others.append(stack.enter_context(Torch(given.torch_python, folder, given.megabytes)))
        if given.store:
            others.append(stack.enter_context(Store(given.store, folder / "raw")))
        measure(folder, given.megabytes, given.rounds, others)


def measure(folder: Path, megabytes: int, rounds: int, others: list[Any]) -> None:
    """Prints what every round measures; `others` are called for more, with a state."""
    warnings.simplefilter("ignore", gshard.GShardWarning)
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(make_state(megabytes), mesh, "p_g_os")
    jax.block_until_ready(state)
    size = sum(plan.bytes_per_device.values()) * mesh.size
    seen = []
    for number in range(rounds + 1):
        seen.append(one_round(folder, number, size, state, plan))
        for other in others:
            seen[-1] |= other.one_round(number, state, plan)
    seen = seen[1:]  # the first imports, and warms up
    print(f"{size / 1e6:,.0f} MB of state on {mesh.size} devices, {rounds} rounds, medians")
    for name, base in BASES.items():
        if name not in seen[0]:
            continue
        seconds = statistics.median(x[name] for x in seen)
        ratio = statistics.median(x[base] / x[name] for x in seen)
        speed = size / seconds / 1e6
        print(f"{name:36s} {seconds:7.2f} s {speed:8,.0f} MB/s  {ratio:5.2f} of raw")
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
    "torch.distributed.checkpoint, save": "write raw",
    "torch.distributed.checkpoint, load": "read raw",
    "store, upload raw": "store, upload raw",
    "store, save, until it returns": "store, upload raw",
    "store, save, until it is a step": "store, upload raw",
    "store, download raw": "store, download raw",
    "store, restore": "store, download raw",
}


def one_round(folder: Path, number: int, size: int, state: Any, plan: Any) -> dict[str, float]:
    """Seconds of each, and bytes of memory beyond those that were in use."""
    found = raw_times(folder / "raw", np.random.default_rng(number).bytes(size))
    like = (plan.abstract_state(), plan)
    with gshard.Checkpointer(folder / "run", keep_last=1) as checkpointer:
        start = reset_peak()
        found |= save_times("save", checkpointer, number, state)
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
    found = save_times("local save", checkpointer, number + 1, state)
    found["local restore"] = timed(lambda: restore(checkpointer, like, True))
    checkpointer.close()
    return found


def save_times(name: str, checkpointer: Any, number: int, state: Any) -> dict[str, float]:
    """Until the call returns, and until the step is complete."""
    returned = timed(lambda: checkpointer.save(number, state))
    complete = returned + timed(checkpointer.wait)
    return {f"{name}, until it returns": returned, f"{name}, until it is a step": complete}


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


class Torch:
    """PyTorch in a process of its own, with tensors of the same shapes."""

    def __init__(self, python: str, folder: Path, megabytes: int):
        shape = (str(3 * LAYERS), str(width_of(megabytes)))
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.checkpoints_torch", str(folder / "torch"), *shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def one_round(self, number: int, state: Any, plan: Any) -> dict[str, float]:
        """Seconds of each."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        try:
            print(number, file=asked, flush=True)
            return json.loads(answers.readline())
        except (OSError, ValueError):
            raise SystemExit(
                "checkpoints: the Python of --torch-python failed, see above"
            ) from None

    def __enter__(self) -> Torch:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


class Store:
    """An address in an object store, with a file to upload as it is."""

    def __init__(self, address: str, raw: Path):
        self._address, self._raw = address.rstrip("/"), raw
        self._bucket = Bucket(self._address)

    def one_round(self, number: int, state: Any, plan: Any) -> dict[str, float]:
        """Seconds of each."""
        found = {"store, upload raw": timed(lambda: self._bucket.create("raw", self._raw))}
        found["store, download raw"] = timed(lambda: self._bucket.read("raw"))
        self._bucket.delete(["raw"])
        with gshard.Checkpointer(f"{self._address}/run", keep_last=1) as checkpointer:
            found |= save_times("store, save", checkpointer, number, state)
            like = (plan.abstract_state(), plan)
            found["store, restore"] = timed(lambda: restore(checkpointer, like, True))
        return found

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._bucket.delete(self._bucket.find(""))


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
