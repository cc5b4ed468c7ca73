"""Elastic jobs of `gshard launch`: machines come and go, and the numbers stay the same."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import hosts as namespaces
from tests import reference
from tests.distributed.elastic_worker import train
from tests.hosts import NoHostsError, until
from tests.jobs import launch, running
from tests.processes import FAST_COMPILATION, free_address

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LIMIT = 240  # seconds for anything that has no bound of its own
WAITS = """
import os, pathlib, time
words = ("GSHARD_RESTARTS", "GSHARD_PROCESS_ID", "GSHARD_NUM_PROCESSES", "GSHARD_NNODES")
print("start", *(os.environ[word] for word in words), flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.02)
"""


# ---- on one machine, of processes that wait -----------------------------------------------------


def test_the_job_goes_on_without_a_machine_that_is_lost(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    command = launch("--nnodes", "2:3", "--master", free_address(), script)
    with (
        running(command, tmp_path) as one,
        running([*command[:-1], "--log_dir", "b", command[-1]], tmp_path) as two,
        running([*command[:-1], "--log_dir", "c", command[-1]], tmp_path) as three,
    ):
        jobs = [one, two, three]

        def starts(restart: int) -> list[str]:
            found = (re.search(rf"start {restart} .*", job.out) for job in jobs)
            return sorted(x[0] for x in found if x)

        one.wait_until(lambda: len(starts(0)) == 3, "three run")
        assert starts(0) == [f"start 0 {rank} 3 3 of 2:3" for rank in range(3)]
        lost = next(job for job in jobs if "start 0 1 3" in job.out)
        lost.process.kill()
        lost.assert_nobody_left()
        jobs.remove(lost)
        jobs[0].wait_until(lambda: len(starts(1)) == 2, "two run")
        assert starts(1) == [f"start 1 {rank} 2 2 of 2:3" for rank in range(2)]
        (tmp_path / "go").touch()
        for job in jobs:
            assert job.code(20) == 0, job.err
            assert re.search(r"machine \d \(.*\) is lost: 2 of 2:3 machines are here", job.err)
            job.assert_nobody_left()


# ---- on four hosts, of a training ---------------------------------------------------------------

STEPS, PAUSE = 40, 0.1  # seconds after each, so that there is something to interrupt


class Launcher:
    """`gshard launch` of an elastic job on one host."""

    def __init__(self, host, folder: Path, *words: object):
        self.host, self._log = host, folder / f"{host.name}-{time.monotonic()}.log"
        options = ["--nnodes", "2:4", "--master", "10.77.0.1:29500", "--virtual_devices", 1]
        options += ["--heartbeat_timeout", 5, "--log_dir", folder / "log", *words]
        worker = ("-m", "tests.distributed.elastic_worker", folder, STEPS, PAUSE)
        own = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        own["XLA_FLAGS"] = FAST_COMPILATION
        command = (sys.executable, "-m", "gshard", "launch", *options, *worker)
        self.process = host.start(self._log, own, *command)

    @property
    def said(self) -> str:
        return f"--- {self.host.name}\n{self._log.read_text()}"


def steps_of(folder: Path, start: int) -> list[dict]:
    """What process 0 wrote in one start of the job."""
    path = folder / f"{start}-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "link"])
def test_four_hosts_and_three_and_four_again(tmp_path, how):
    try:
        with namespaces.hosts(tmp_path, 4) as hosts:
            _lose_and_bring_back(hosts, tmp_path, how)
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here (they need root and `ip`): {error}")
    losses = {}
    for start, on in enumerate(([4, 2], [3, 4], [4, 2])):  # devices and micro-batches
        found = steps_of(tmp_path, start)
        assert all(x["on"] == on for x in found), found
        losses |= {x["step"]: x["loss"] for x in found}
    undisturbed: list[dict] = []
    alone = tmp_path / "alone"
    alone.mkdir()
    train(alone, STEPS, undisturbed.append)
    assert [x["step"] for x in undisturbed] == sorted(losses) == [*range(1, STEPS + 1)]
    expected = [x["loss"] for x in undisturbed]
    reference.assert_same_values([losses[i + 1] for i in range(STEPS)], expected, 1e-6)


def _lose_and_bring_back(hosts, folder: Path, how: str) -> None:
    launchers = [Launcher(host, folder, "--join_every", 0.05) for host in hosts]

    def said() -> str:
        return "\n".join(x.said for x in launchers)

    def until_steps(start: int, count: int = 6) -> None:
        ended = lambda: [x for x in launchers if x.process.poll() not in (None, -signal.SIGKILL)]  # noqa: E731
        until("training", lambda: len(steps_of(folder, start)) >= count or ended(), LIMIT)
        assert not ended(), said()

    until_steps(0)
    if how == "kill":
        launchers[2].process.kill()
    else:
        hosts[2].run("ip", "link", "set", "eth0", "down")
    until_steps(1)
    if how == "kill":
        launchers.append(Launcher(hosts[2], folder, "--join_every", 0.05))
    else:
        hosts[2].run("ip", "link", "set", "eth0", "up")
    for launcher in launchers:
        if launcher.process.poll() is None:
            assert launcher.process.wait(LIMIT) == 0, said()
    for host in hosts:
        until(f"empty: {host.name}", lambda host=host: not host.processes(), 2)
    events = [json.loads(x) for x in (folder / "log" / "events.jsonl").read_text().splitlines()]
    assert [x["machines"] for x in events if x["event"] == "start" and x["rank"] is None] == [
        4, 3, 4,
    ]  # fmt: skip
    assert "other machines have come: stopping all processes in order" in said()
