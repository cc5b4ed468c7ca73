"""Runs the processes of a job on this machine once, from their start to the end of the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gshard._util.errors import GShardError
from gshard.distributed import env_vars
from gshard.distributed.launch.exit_status import End
from gshard.distributed.launch.options import Request
from gshard.distributed.launch.output import Lines, Log, Stream
from gshard.distributed.launch.supervisor import Child, Supervisor
from gshard.distributed.rendezvous import LOOPBACK, Address, ReservedPort

_RUN = Path(__file__).with_name("run_script.py")


class Outcome(NamedTuple):
    """The outcome of a job.

    Attributes:
      ends: the ends of the processes that were started, in the order of their ranks.
      told: the signal that this program received meanwhile, if any.
      memory_kills: number of processes that the kernel killed for memory meanwhile.
    """

    ends: list[End]
    told: int | None
    memory_kills: int

    @property
    def failed(self) -> bool:
        """Whether a process failed by itself, and not because of the signal that the job got."""
        by_signal = () if self.told is None else (128 + self.told, -self.told)
        return any(e.failed and e.code not in by_signal and not e.asked for e in self.ends)


def run(request: Request, restarts: int, told: list[int]) -> Outcome:
    """Starts the processes and waits for all of them; if one fails, ends the others.

    Args:
      request: what to start.
      restarts: how often the job was started before.
      told: signals that arrive meanwhile; the first is passed on, the second ends the wait.

    Raises:
      GShardError: the port is taken, a log cannot be written, a process cannot be started.
    """
    kept, kills = _keep_port(request), _memory_kills()
    try:
        supervisor = Supervisor(None if request.world_size == 1 else request.heartbeat_timeout)
        try:
            for local in range(request.processes):
                if not told:
                    supervisor.add(_start(request, local, restarts, kept))
            while supervisor.running:
                supervisor.tick()
                if told:
                    _stop_in_order(supervisor, told, request.grace)
                elif supervisor.failed:
                    supervisor.settle()
                    supervisor.end_rest()
        finally:
            supervisor.close()
    except OSError as error:
        if isinstance(error, GShardError):
            raise
        raise GShardError(f"the processes cannot be started: {error.strerror}.") from error
    finally:
        if kept:
            kept.release()
    ends = [supervisor.ends[child.rank] for child in supervisor.children]
    return Outcome(ends, told[0] if told else None, _memory_kills() - kills)


def _keep_port(request: Request) -> ReservedPort | None:
    """Keeps the port of process 0, if that process runs on this machine."""
    if request.world_size == 1 or request.machine:
        return None
    return ReservedPort(*(request.master or Address(LOOPBACK, 0)))


def _start(request: Request, local: int, restarts: int, kept: ReservedPort | None) -> Worker:
    rank = request.rank(local)
    told = env_vars.process_variables(
        kept.address if kept else request.master or Address(LOOPBACK, 1),
        request.world_size,
        rank,
        local,
        heartbeat_timeout_seconds=request.heartbeat_timeout,
        initialization_timeout=request.start_timeout,
        restarts=restarts,
        port_is_kept=kept is not None,
    )
    variables = {**os.environ, **request.variables[local], **told, "PYTHONUNBUFFERED": "1"}
    command = ["module" if request.module else "file", request.target, *request.arguments]
    tag = f"[rank {rank}] " if request.world_size > 1 else ""
    return Worker(rank, command, variables, Log(request.log_dir, rank), tag)


def _stop_in_order(supervisor: Supervisor, told: list[int], grace: float) -> None:
    """Passes a signal on once; a second signal, or a process that fails, ends the wait."""
    deadline = time.monotonic() + grace
    supervisor.send(told[0])
    while supervisor.running and time.monotonic() < deadline and len(told) == 1:
        supervisor.tick()
        if supervisor.failed:
            supervisor.settle()
            break
    supervisor.kill()


class Worker(Child):
    """A process that runs the script, with a log."""

    def __init__(
        self, rank: int, command: list[str], environment: dict[str, str], log: Log, tag: str
    ):
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(_RUN), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to end what it starts itself too
        )
        lines = Lines()
        pipes = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        outputs = {
            pipe: Stream(pipe.fileno(), to, tag, lines, log.write)
            for pipe, to in pipes
            if pipe is not None
        }
        super().__init__(rank, self._process.pid, outputs, lines)

    def exit_code(self) -> int | None:
        """Returns the exit code that the system reports."""
        return self._process.poll()

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait()

    def close(self) -> None:
        """Closes its pipes and its log."""
        super().close()
        self._log.close()


def _memory_kills() -> int:
    """Counts the processes that the kernel has killed for memory since boot; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@contextmanager
def heard() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list instead of letting them end this program."""
    told: list[int] = []

    def hear(number: int, frame: object) -> None:
        told.append(number)

    before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
