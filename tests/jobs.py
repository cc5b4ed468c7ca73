"""Real jobs for the tests: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gshard.distributed.rendezvous import PortTakenError, ReservedPort
from tests.processes import clean_environment

ROOT = Path(__file__).parents[1]
MARK = "GSHARD_TEST_JOB"
LIMIT = 90  # seconds for anything that should take a few


class Job:
    """A program and all processes that come of it, found again by a mark in their environment."""

    def __init__(self, command: list[str], folder: Path, **variables: str):
        self.mark, self.folder = uuid.uuid4().hex, folder
        own = {"PYTHONPATH": str(ROOT), MARK: self.mark}
        self._files = [(folder / f"{self.mark}.{name}").open("w+b") for name in ("out", "err")]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment() | own | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    def code(self, limit: float = LIMIT) -> int:
        """The program's exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {limit} s\n{self.out}\n{self.err}") from None

    @property
    def out(self) -> str:
        return (self.folder / f"{self.mark}.out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / f"{self.mark}.err").read_text()

    def pids(self) -> dict[int, dict[str, str]]:
        """Environments by pid of all that lives of the job, but for the program itself."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is not ours
                environment = process.environ()
                marked = environment.get(MARK) == self.mark and process.pid != self.process.pid
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """pids by rank of the processes that run a rank."""
        return {int(e["GSHARD_PROCESS_ID"]): p for p, e in self.pids().items() if _leads(p, e)}

    def wait_until(self, true: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        end = time.monotonic() + limit
        while not true():
            assert self.process.poll() is None, f"ended before {what}\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"not {what} in {limit} s\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def until_training(self, processes: int = 2) -> None:
        """Waits until each has said `first step`, as the workers of the tests do."""
        self.wait_until(lambda: self.out.count("first step") == processes, "all train")

    def assert_nobody_left(self, within: float = 2.0) -> None:
        end = time.monotonic() + within
        while self.pids() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.pids(), [psutil.Process(pid).cmdline() for pid in self.pids()]

    def kill_all(self) -> None:
        for pid in (self.process.pid, *self.pids()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        for file in self._files:
            file.close()


def _leads(pid: int, environment: dict[str, str]) -> bool:
    """Whether a process runs a rank itself, and is none that a rank has started."""
    try:
        return "GSHARD_PROCESS_ID" in environment and os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def running(command: list[str], folder: Path, **variables: str) -> Iterator[Job]:
    """A job; whatever happens, nothing of it is left."""
    job = Job(command, folder, **variables)
    try:
        yield job
    finally:
        job.kill_all()


def launch(*words: object) -> list[str]:
    """The command line of `gshard launch`."""
    return [sys.executable, "-m", "gshard", "launch", *map(str, words)]


def assert_port_is_free(port: int, within: float = 2.0) -> None:
    """Nobody listens, and the next job may; threads of who was killed may take a moment to end."""
    end = time.monotonic() + within
    while True:
        try:
            return ReservedPort("127.0.0.1", port).release()
        except PortTakenError:
            assert time.monotonic() < end, f"port {port} is held"
            time.sleep(0.05)
