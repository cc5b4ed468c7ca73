"""Starts the processes of a test. None is left behind, whatever happens."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.groups import free_address

ROOT = Path(__file__).parents[1]
# LLVM does not optimize, and gets a program in one part: compiling takes half of the time. The text
# of a program, with its collectives and its memory, is the same, since these flags act on what
# comes after it.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
FUSE_LESS = "--xla_cpu_use_fusion_emitters=false"  # of the quick tier alone (tests/conftest.py)
LIMIT = 300  # seconds for all of a group together


class Ended(NamedTuple):
    """How a process ended, None if it had to be killed, and what it said."""

    code: int | None
    said: str


def variables(coordinator: str, processes: int, rank: int) -> dict[str, str]:
    """Who a process is, in gshard's words."""
    names = ("GSHARD_COORDINATOR", "GSHARD_NUM_PROCESSES", "GSHARD_PROCESS_ID")
    return dict(zip(names, (coordinator, str(processes), str(rank)), strict=True))


def fast_compilation() -> str:
    """XLA's flags for a process that a test starts: those that the tests compile with."""
    fuses_less = FUSE_LESS in os.environ.get("XLA_FLAGS", "")
    return f"{FAST_COMPILATION} {FUSE_LESS}" if fuses_less else FAST_COMPILATION


def clean_environment() -> dict[str, str]:
    """This one for a job of its own on CPUs.

    Without the tests' devices, a cluster or launcher around them, and a user's compilation cache.
    """
    apart = ("XLA_FLAGS", "GSHARD_", "SLURM_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "PADDLE_")
    apart += ("JAX_COMPILATION_CACHE_",)
    own = {k: v for k, v in os.environ.items() if not k.startswith(apart)}
    # The check of a loss is one more compilation in every process.
    return own | {"JAX_PLATFORMS": "cpu", "GSHARD_CHECK_LOSS": "0", "XLA_FLAGS": fast_compilation()}


def run_together(
    folder: Path,
    commands: Sequence[Sequence[str]],
    variables: Sequence[Mapping[str, str]] = (),
    *,
    limit: float = LIMIT,
    to_the_end: bool = False,
) -> list[Ended]:
    """Runs `python *command` for each, all at once, with its variables added to the environment's.

    Until all have ended or time is up; or until one has failed, unless it is `to_the_end`.
    """
    common = clean_environment()
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    started: list[subprocess.Popen] = []
    try:
        for i, command in enumerate(commands):
            own = variables[i] if variables else {}
            with logs[i].open("w") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=ROOT,
                        env=common | own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            codes = [process.poll() for process in started]
            if None not in codes or (any(codes) and not to_the_end):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [Ended(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def assert_all_well(ended: Sequence[Ended]) -> None:
    said = "\n".join(f"--- process {i} ---\n{end.said}" for i, end in enumerate(ended))
    codes = [end.code for end in ended]
    assert codes == [0] * len(ended), f"exit codes {codes} (None: time was up)\n{said}"


def run_workers(
    folder: Path,
    module: str,
    *what: str,
    processes: int = 2,
    devices_each: int = 2,
    limit: float = LIMIT,
) -> list[dict[str, np.ndarray]]:
    """What each process of `python -m tests.MODULE COORDINATOR PROCESSES RANK FILE *what` saved."""
    coordinator = free_address()
    files = [folder / f"{rank}.npz" for rank in range(processes)]
    commands = [
        ["-m", f"tests.{module}", coordinator, str(processes), str(rank), str(file), *what]
        for rank, file in enumerate(files)
    ]
    count = f"--xla_force_host_platform_device_count={devices_each}"
    flags = {"XLA_FLAGS": f"{count} {fast_compilation()}"}
    assert_all_well(run_together(folder, commands, [flags] * processes, limit=limit))
    return _saved(folder, processes)


def run_workers_once(
    factory: pytest.TempPathFactory, name: str, module: str, *what: str, **sizes: Any
) -> list[dict[str, np.ndarray]]:
    """As `run_workers`, once for all of pytest's workers, which share the tests of a file."""
    folder = once(factory, name, lambda folder: run_workers(folder, module, *what, **sizes))
    return _saved(folder, sizes.get("processes", 2))


def once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], object]) -> Path:
    """Runs `run(folder)` once for all of pytest's workers; returns the folder."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        done = folder / "done"
        if not done.exists():
            try:
                run(folder)
            except Exception as error:  # not again for each test: it may take until time is up
                done.write_text(f"{type(error).__name__}: {error}")
                raise
            done.touch()
    if failure := done.read_text():
        raise AssertionError(f"the run that several tests share has failed: {failure}")
    return folder


def _saved(folder: Path, processes: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(processes)]
