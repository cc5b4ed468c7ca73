"""`gshard launch` on two hosts, each a network namespace of this machine: see `hosts.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import gshard
from tests import hosts as namespaces
from tests import reference
from tests.distributed.two_hosts_worker import train
from tests.hosts import NoHostsError, until
from tests.processes import fast_compilation
from tests.tiers import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

PORT, DEVICES_EACH = 29500, 2
HEARTBEAT = 5  # seconds
AT_ONCE = HEARTBEAT + 5  # seconds in which all have ended, once one has
LIMIT = 240  # seconds for anything that has no bound of its own


class Launcher:
    """`gshard launch` on one of the hosts."""

    def __init__(self, host, rank: int, folder: Path, *words: object, master: str = "10.77.0.1"):
        self.host = host
        self._log = folder / f"launcher-{rank}.log"
        options = ["--nnodes", 2, "--rank", rank, "--master", f"{master}:{PORT}"]
        options += ["--virtual_devices", DEVICES_EACH, "--heartbeat_timeout", HEARTBEAT]
        options += ["--log_dir", folder / "log"]
        command = (sys.executable, "-m", "gshard", "launch", *options, *words)
        # Of the tests' own devices nothing: the launcher sets those of the processes.
        own = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        own["XLA_FLAGS"] = fast_compilation()
        self._process = host.start(self._log, own, *command)

    @property
    def said(self) -> str:
        """All that it has printed, its lines joined: where they break is of no interest."""
        return re.sub(r"\s*\ngshard: +", " ", self._log.read_text())

    def code(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, limit: float) -> int:
        """Its exit code."""
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {limit:g} s:\n{self.said}")


class Job:
    """The launchers of both hosts."""

    def __init__(self, hosts, folder: Path, *words: object):
        self.hosts, self.folder = hosts, folder
        self.launchers = [Launcher(h, i, folder, *words) for i, h in enumerate(hosts)]

    def until_running(self, ranks: int, restart: int = 0) -> list[int]:
        """Waits until every rank trains; their pids."""
        files = [self.folder / f"{rank}.running-{restart}" for rank in range(ranks)]

        def written() -> bool:
            return all(f.exists() and f.read_text() for f in files)

        until("training", lambda: written() or self.ended, LIMIT)
        assert not self.ended, self.said
        return [int(f.read_text()) for f in files]

    @property
    def ended(self) -> bool:
        return any(launcher.code() is not None for launcher in self.launchers)

    @property
    def said(self) -> str:
        return "\n".join(f"--- {x.host.name}\n{x.said}" for x in self.launchers)

    def wait(self, limit: float) -> list[int]:
        """The exit codes of both, within `limit` seconds."""
        end = time.monotonic() + limit
        return [x.wait(max(0.0, end - time.monotonic())) for x in self.launchers]

    def assert_nobody_is_left(self) -> None:
        for host in self.hosts:
            until(f"empty: {host.name}", lambda host=host: not host.processes(), 2)


@pytest.fixture
def hosts(tmp_path):
    try:
        with namespaces.hosts(tmp_path) as both:
            yield both
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here (they need root and `ip`): {error}")


@pytest.fixture
def stepping(hosts, tmp_path):
    """`stepping(*options)`: a job of one process on each host, which trains until it is stopped."""

    def start(*options: object, script: tuple[str, ...] = ()) -> Job:
        words = (*options, "-m", "tests.distributed.two_hosts_worker", "steps", tmp_path, *script)
        return Job(hosts, tmp_path, *words)

    return start


# ---- it works ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "level"), quick([(1, "os_g"), (2, "p_g_os")], [(1, "os_g")]))
def test_numbers_are_those_of_one_process(hosts, tmp_path, each, level):
    """Meanwhile nothing listens but at the hosts' own addresses."""
    worker = ("-m", "tests.distributed.two_hosts_worker", "numbers", tmp_path, level)
    job = Job(hosts, tmp_path, "--nproc_per_node", each, *worker)
    heard = {host.name: set() for host in hosts}
    until("over", lambda: _listen(heard, hosts) or job.ended, LIMIT)
    assert job.wait(LIMIT) == [0, 0], job.said
    assert heard == {host.name: {host.address} for host in hosts}
    job.assert_nobody_is_left()
    devices = 2 * each * DEVICES_EACH
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    losses, params = train(level, mesh, rank=0, processes=1)
    for rank in range(2 * each):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert found["devices"].tolist() == [DEVICES_EACH, devices]
        reference.assert_same_values(found["losses"], losses, 1e-6)
        start = "params/"
        theirs = {k.removeprefix(start): x for k, x in found.items() if k.startswith(start)}
        reference.assert_same_leaves(theirs, params, 1e-6, relative_to="leaf")


def _listen(heard: dict[str, set[str]], hosts) -> None:
    for host in hosts:
        heard[host.name] |= host.listeners()


# ---- one of them is lost -------------------------------------------------------------------------


def test_a_process_that_is_killed_ends_both_hosts(stepping):
    job = stepping()
    os.kill(job.until_running(2)[1], signal.SIGKILL)
    codes = job.wait(AT_ONCE)
    job.assert_nobody_is_left()
    here, there = (launcher.said for launcher in job.launchers)
    assert codes[1] == 128 + signal.SIGKILL, there
    assert "rank 1 was killed by SIGKILL" in there
    assert codes[0] in (1, 128 + signal.SIGABRT), here
    # What it was doing decides whether a closed connection or the silence tells it.
    assert re.search("It lost its connection to another process|rank 1 had not answered", here)


@pytest.mark.slow
def test_a_job_starts_again_on_both_hosts(stepping):
    job = stepping("--max_restarts", 1, script=("--few-after-restart",))
    os.kill(job.until_running(2)[1], signal.SIGKILL)
    assert job.wait(LIMIT) == [0, 0], job.said
    assert all((job.folder / f"{rank}.running-1").exists() for rank in range(2))
    for launcher in job.launchers:
        assert "starting all processes again in 1 s (1 of 1)" in launcher.said
    job.assert_nobody_is_left()


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_hosts(stepping, hosts):
    job = stepping()
    job.until_running(2)
    hosts[1].run("ip", "link", "set", "eth0", "down")
    codes = job.wait(AT_ONCE + HEARTBEAT)
    job.assert_nobody_is_left()
    assert 0 not in codes
    here, there = (launcher.said for launcher in job.launchers)
    assert "rank 1 had not answered for the heartbeat timeout" in here
    assert "It lost its connection to another process" in there


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_processes_along(stepping, hosts):
    job = stepping()
    job.until_running(2)
    job.launchers[0].send(signal.SIGKILL)
    until("empty", lambda: not hosts[0].processes(), 2)
    assert job.launchers[1].wait(AT_ONCE) != 0
    assert "It lost its connection to another process" in job.launchers[1].said
    job.assert_nobody_is_left()


# ---- the start and the end -----------------------------------------------------------------------


def test_who_is_missing_is_said(hosts, tmp_path):
    """The second host never starts."""
    words = ("--nproc_per_node", 2, "--start_timeout", 5)
    worker = ("-m", "tests.distributed.two_hosts_worker", "steps", tmp_path)
    launcher = Launcher(hosts[0], 0, tmp_path, *words, *worker)
    assert launcher.wait(LIMIT) == 1
    assert "arrived: 0, 1; missing: 2, 3" in launcher.said
    assert "Not all processes of the job came in time" in launcher.said
    assert not hosts[0].processes()


@pytest.mark.slow
def test_a_machine_that_knows_itself_as_loopback(hosts, tmp_path):
    """As Debian sets it up: refused as --master, and explained where Gloo takes it."""
    for i, host in enumerate(hosts):
        names, other = tmp_path / f"hosts-{i}", hosts[1 - i]
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
        with names.open("a") as file:
            file.write(f"{other.address} {other.name}\n")
        host.knows(names)
    worker = ("-m", "tests.distributed.two_hosts_worker", "numbers", tmp_path, "os_g")
    launcher = Launcher(hosts[0], 0, tmp_path, *worker, master="host-a")
    assert launcher.wait(LIMIT) == 2
    assert "--master host-a:29500 is this machine alone (127.0.1.1 in its own" in launcher.said
    job = Job(hosts, tmp_path, *worker)
    assert 0 not in job.wait(LIMIT)
    assert "that is a loopback address" in job.said


@pytest.mark.slow
def test_one_host_gets_a_signal_and_both_stop(stepping, tmp_path):
    job = stepping("--nproc_per_node", 2)
    job.until_running(4)
    job.launchers[1].send(signal.SIGTERM)
    assert job.wait(LIMIT) == [
        gshard.distributed.PREEMPTED_EXIT_CODE,
        gshard.distributed.PREEMPTED_EXIT_CODE,
    ], job.said
    steps = {(tmp_path / f"{rank}.stopped").read_text() for rank in range(4)}
    assert len(steps) == 1, steps
    job.assert_nobody_is_left()
