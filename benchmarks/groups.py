"""Programs that cannot share a process: each in a group of processes that step on command.

A group runs alone: the others wait for their line. So groups can be timed in turn, as programs of
one process are (`timing`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RANK, SIZE, ADDRESS = "BENCHMARK_RANK", "BENCHMARK_SIZE", "BENCHMARK_ADDRESS"


class ProcessGroup:
    """Processes of one program, one for each rank; all of them know a free address of this machine.

    Args:
      module: what each runs, `python -m module *args`; it ends in `serve`.
      args: its arguments.
      size: processes.
      python: that runs it.
    """

    def __init__(self, module: str, args: Sequence[str], size: int, python: str = sys.executable):
        self._said = tempfile.TemporaryFile("w+")
        env = os.environ | {SIZE: str(size), ADDRESS: free_address()}
        self._processes = [
            subprocess.Popen(
                [python, "-m", module, *args],
                env=env | {RANK: str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
            for rank in range(size)
        ]

    def step(self, seconds: float = math.inf) -> list[Any]:
        """What the step gives on every rank, which starts when all have the command.

        Raises:
          SystemExit: a process has ended, or not answered within so many seconds.
        """
        until = time.monotonic() + seconds
        for process in self._processes:
            self._write(process, "step")
        return [self._read(process, until) for process in self._processes]

    def end(self) -> list[Any]:
        """What every rank reports, at last."""
        for process in self._processes:
            self._write(process, "end")
        return [self._read(process) for process in self._processes]

    def stop(self) -> None:
        """Ends the processes, whatever they do; once is enough."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # a command that it did not read
                process.communicate()
        self._said.close()

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _read(self, process: subprocess.Popen[str], until: float = math.inf) -> Any:
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], 0.5)[0]:
            if time.monotonic() > until:
                self._fail("did not answer in time")
            if any(other.poll() is not None for other in self._processes):
                self._fail()  # the one that is asked may wait for another in vain
        line = process.stdout.readline()
        return json.loads(line) if line else self._fail()

    def _fail(self, what: str = "ended") -> Any:
        self._said.seek(0)
        said = self._said.read()[-2000:]
        self.stop()
        raise SystemExit(f"a process of the benchmark {what}:\n{said}")


def serve(make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> None:
    """In a process of a group: makes a step and a report, and gives what each says when asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    step, report = make()
    for line in sys.stdin:
        found = step() if line.strip() == "step" else report()
        print(json.dumps(found), file=answers, flush=True)
        if line.strip() == "end":
            break


def free_address() -> str:
    """Host and port on this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def rank() -> int:
    """Of this process in its group."""
    return int(os.environ[RANK])


def size() -> int:
    """Processes of this group."""
    return int(os.environ[SIZE])


def memory() -> int:
    """Bytes of memory that this process has now (resident, Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def on_own_cores() -> None:
    """Gives this process its part of the cores, where each process can have one."""
    cores = sorted(os.sched_getaffinity(0))
    own = len(cores) // size()
    if own:
        os.sched_setaffinity(0, cores[rank() * own : (rank() + 1) * own])
