"""The processes of a job on this machine: run once, from their start to their last end."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gshard.errors import GShardError
from gshard.launch.arguments import Request
from gshard.launch.worker import Worker
from gshard.processes import environment
from gshard.processes.address import LOOPBACK, Address, Kept
from gshard.processes.ending import FAILED_GRACE, end, send, settle
from gshard.processes.guardian import Guardian, kill_group
from gshard.processes.leaving import PREEMPTED
from gshard.processes.verdict import End

_TICK = 0.05  # seconds


class Outcome(NamedTuple):
    """What came of a job.

    Attributes:
      ends: of its processes, in the order of their ranks.
      told: the signal that this program was sent meanwhile, if any.
      memory_kills: processes that the kernel killed for memory meanwhile.
    """

    ends: list[End]
    told: int | None
    memory_kills: int

    @property
    def failed(self) -> bool:
        """Whether a process failed, by itself."""
        return self.told is None and any(e.code not in (0, PREEMPTED) for e in self.ends)


def run(request: Request, restarts: int) -> Outcome:
    """Starts the processes and waits for all; when one fails, ends the others.

    Raises:
      GShardError: the port is taken, a log cannot be written.
    """
    kept = _keep_port(request)
    at = kept.address if kept else request.master
    guardian, job = Guardian(), _Job(request)
    try:
        with job.hearing_signals():
            for local in range(request.processes):
                job.start(local, at, restarts, kept is not None, guardian)
            job.wait()
    finally:
        job.close()
        guardian.close()
        if kept:
            kept.release()
    return job.outcome()


def _keep_port(request: Request) -> Kept | None:
    """The port of process 0, where it is one of this machine's."""
    if request.world_size == 1 or request.machine:
        return None
    return Kept(*(request.master or Address(LOOPBACK, 0)))


class _Job:
    def __init__(self, request: Request):
        self._request = request
        self._workers: list[Worker] = []
        self._ends: dict[int, End] = {}
        self._selector = selectors.DefaultSelector()
        self._told: list[int] = []
        self._stopped: set[int] = set()
        self._still: dict[int, float] = {}  # since when a rank has been stopped
        self._asked: set[int] = set()
        self._began, self._kills = time.monotonic(), _memory_kills()
        self._guardian: Guardian | None = None

    # ---- start -----------------------------------------------------------------------------------

    def start(
        self, local: int, at: Address | None, restarts: int, kept: bool, guardian: Guardian
    ) -> None:
        request, rank = self._request, self._request.rank(local)
        told = environment.variables(
            at or Address(LOOPBACK, 1),
            request.world_size,
            rank,
            local,
            heartbeat_timeout=request.heartbeat_timeout,
            start_timeout=request.start_timeout,
            restarts=restarts,
            port_is_kept=kept,
        )
        variables = {**os.environ, **request.variables[local], **told, "PYTHONUNBUFFERED": "1"}
        command = ["module" if request.module else "file", request.target, *request.arguments]
        tag = f"[rank {rank}] " if request.world_size > 1 else ""
        worker = Worker(rank, command, variables, _log(request.log_dir, rank), tag)
        guardian.watch(worker.pid)
        self._guardian = guardian
        self._workers.append(worker)
        worker.register(self._selector)

    # ---- until all have ended --------------------------------------------------------------------

    def wait(self) -> None:
        while self._running():
            self._tick()
            if self._told:
                self._stop_in_order()
            elif any(e.code not in (0, PREEMPTED) for e in self._ends.values()):
                self._end_the_others()

    def _end_the_others(self) -> None:
        settle(self._running, self._tick)
        stopped = [w for w in self._left() if w.is_stopped()]
        self._stopped |= {w.rank for w in stopped}
        self._asked = {w.rank for w in self._left()}
        for worker in stopped:  # it hears nothing else
            kill_group(worker.pid)
        end(self._running, FAILED_GRACE, self._tick)

    def _stop_in_order(self) -> None:
        """Passes a signal on, once; a second one ends patience."""
        number, deadline = self._told[0], time.monotonic() + self._request.grace
        send(self._running(), number)
        while self._running() and time.monotonic() < deadline and len(self._told) == 1:
            self._tick()
        self._asked = {w.rank for w in self._left()}
        for pid in self._running():
            kill_group(pid)
        while self._running():
            self._tick()

    def _tick(self) -> None:
        """Passes output on for a moment, and notes who has ended."""
        for key, _ in self._selector.select(_TICK):
            if not key.data.pass_on():
                self._selector.unregister(key.fileobj)
        self._note()

    def _note(self) -> None:
        for worker in self._left():
            code = worker.code()
            if code is None:
                self._note_stopped(worker)
                continue
            kill_group(worker.pid)  # what it started itself
            worker.drain()
            self._ends[worker.rank] = End(
                worker.rank,
                code,
                tuple(worker.lines.shown),
                "\n".join(worker.lines.every),
                time.monotonic() - self._began,
                worker.rank in self._stopped,
                worker.rank in self._asked,
            )
            if self._guardian:
                self._guardian.forget(worker.pid)

    def _note_stopped(self, worker: Worker) -> None:
        """A process that is stopped counts as dead as one that hangs does, also while it starts."""
        if self._request.world_size == 1 or not worker.is_stopped():
            self._still.pop(worker.rank, None)
            return
        since = self._still.setdefault(worker.rank, time.monotonic())
        if time.monotonic() - since > self._request.heartbeat_timeout:
            self._stopped.add(worker.rank)
            kill_group(worker.pid)

    def _left(self) -> list[Worker]:
        return [w for w in self._workers if w.rank not in self._ends]

    def _running(self) -> list[int]:
        return [w.pid for w in self._left()]

    # ---- the end ---------------------------------------------------------------------------------

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT are noted, instead of ending this program in front of the others."""

        def hear(number: int, frame: object) -> None:
            self._told.append(number)

        numbers = (signal.SIGTERM, signal.SIGINT)
        before: list[tuple[int, Callable | int | None]] = [
            (n, signal.signal(n, hear)) for n in numbers
        ]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def close(self) -> None:
        """Leaves nobody behind, also after an error of this program itself."""
        for worker in self._left():
            kill_group(worker.pid)
            worker.wait()
        for worker in self._workers:
            worker.close()
        self._selector.close()

    def outcome(self) -> Outcome:
        ends = [self._ends[w.rank] for w in self._workers]
        return Outcome(ends, self._told[0] if self._told else None, _memory_kills() - self._kills)


def _log(folder: Path, rank: int) -> BinaryIO:
    """A log that its owner alone may read, at its end."""
    path = folder / f"rank-{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        number = os.open(path, flags, 0o600)
        os.fchmod(number, 0o600)
    except OSError as error:
        raise GShardError(
            f"--log_dir {folder}: {path} cannot be written ({error.strerror}). Name another folder."
        ) from error
    file = os.fdopen(number, "ab", buffering=0)
    file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} ---\n".encode())
    return file


def _memory_kills() -> int:
    """Processes that the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
