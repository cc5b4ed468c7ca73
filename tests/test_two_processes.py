"""Two real processes of two devices each give the numbers of one process with four."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import gshard
from tests import reference
from tests.tiers import quick
from tests.two_processes_worker import RUNS, train
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters stay whole")

ROOT = Path(__file__).parents[1]
PROCESSES, DEVICES_EACH, LIMIT = 2, 2, 300  # LIMIT: seconds for all of them together


def run_workers(folder: Path, module: str, *what: str) -> list[dict[str, np.ndarray]]:
    """What each process saved, given `what`. No process is left behind, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES_EACH}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    files = [folder / f"{rank}.npz" for rank in range(PROCESSES)]
    logs = [folder / f"{rank}.log" for rank in range(PROCESSES)]
    workers = []
    try:
        for rank in range(PROCESSES):
            command = [sys.executable, "-m", f"tests.{module}", coordinator]
            command += [str(PROCESSES), str(rank), str(files[rank]), *what]
            with logs[rank].open("w") as log:
                workers.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        wait(workers, time.monotonic() + LIMIT)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ends = [worker.returncode for worker in workers]
    output = "\n".join(f"--- process {i} ---\n{log.read_text()}" for i, log in enumerate(logs))
    assert ends == [0] * PROCESSES, f"exit codes {ends} within {LIMIT} s\n{output}"
    return [dict(np.load(file)) for file in files]


def wait(workers: list[subprocess.Popen], deadline: float) -> None:
    """Until all have ended, one has failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes):
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found(tier)`: what the processes saved of its runs."""

    @functools.cache
    def of(tier):
        return run_workers(tmp_path_factory.mktemp(tier), "two_processes_worker", tier)

    return of


def test_ranks_and_devices(found):
    found = found("quick")
    for rank, process in enumerate(found):
        assert process["ranks"].tolist() == [rank, PROCESSES]
        assert process["devices"].tolist() == [DEVICES_EACH, PROCESSES * DEVICES_EACH]
        assert process["owners"].tolist() == [0, 1]
    assert (found[0]["group"] == found[1]["group"]).all()


@pytest.mark.parametrize(
    "run",
    quick([*RUNS["quick"], *RUNS["slow"]], RUNS["quick"]),
    ids=lambda run: f"{run.model}-{run.level}",
)
def test_numbers_are_those_of_one_process(found, run):
    mesh = gshard.make_mesh(devices=jax.devices()[: PROCESSES * DEVICES_EACH])
    losses, params = train(run, mesh, rank=0, world_size=1)
    tier = "quick" if run in RUNS["quick"] else "slow"
    i = RUNS[tier].index(run)
    for process in found(tier):
        reference.assert_same_values(process[f"{i}/losses"], losses, 1e-6)
        prefix = f"{i}/params/"
        theirs = {key.removeprefix(prefix): x for key, x in process.items() if prefix in key}
        reference.assert_same_leaves(
            theirs, params, 1e-6, relative_to="tree", without=ZOO[run.model].zero
        )
