"""The processes of a job on this machine: run once, from their start to their last end."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gshard._util.errors import GShardError
from gshard.distributed import env_vars
from gshard.distributed.launch.exit_status import End
from gshard.distributed.launch.guardian import (
    FAILED_GRACE,
    TICK,
    Guardian,
    end,
    kill_group,
    kill_rest,
    send,
    settle,
)
from gshard.distributed.launch.options import Request
from gshard.distributed.launch.output import Log
from gshard.distributed.launch.process_group import Worker
from gshard.distributed.rendezvous import LOOPBACK, Address, Kept


class Outcome(NamedTuple):
    """What came of a job.

    Attributes:
      ends: of the processes that were started, in the order of their ranks.
      told: the signal that this program was sent meanwhile, if any.
      memory_kills: processes that the kernel killed for memory meanwhile.
    """

    ends: list[End]
    told: int | None
    memory_kills: int

    @property
    def failed(self) -> bool:
        """Whether a process failed by itself, and not by the signal that the job was told."""
        by_signal = () if self.told is None else (128 + self.told, -self.told)
        return any(e.failed and e.code not in by_signal and not e.asked for e in self.ends)


def run(request: Request, restarts: int, told: list[int]) -> Outcome:
    """Starts the processes and waits for all; when one fails, ends the others.

    Args:
      request: what to start.
      restarts: how often it was started before.
      told: signals that come meanwhile; the first is passed on, the second ends patience.

    Raises:
      GShardError: the port is taken, a log cannot be written, a process cannot be started.
    """
    kept = _keep_port(request)
    try:
        guardian = Guardian()
        job = _Job(request, restarts, kept, guardian, told)
        try:
            job.start()
            job.wait()
        finally:
            job.close()
            guardian.close()
    except OSError as error:
        if isinstance(error, GShardError):
            raise
        raise GShardError(f"the processes cannot be started: {error.strerror}.") from error
    finally:
        if kept:
            kept.release()
    return job.outcome()


def _keep_port(request: Request) -> Kept | None:
    """The port of process 0, where it is one of this machine's."""
    if request.world_size == 1 or request.machine:
        return None
    return Kept(*(request.master or Address(LOOPBACK, 0)))


class _Job:
    def __init__(
        self,
        request: Request,
        restarts: int,
        kept: Kept | None,
        guardian: Guardian,
        told: list[int],
    ):
        self._request, self._restarts, self._kept = request, restarts, kept
        self._guardian, self._told = guardian, told
        self._workers: list[Worker] = []
        self._ends: dict[int, End] = {}
        self._selector = selectors.DefaultSelector()
        self._stopped: set[int] = set()
        self._still: dict[int, float] = {}  # since when a rank has been stopped
        self._asked: set[int] = set()
        self._began, self._kills = time.monotonic(), _memory_kills()

    # ---- start -----------------------------------------------------------------------------------

    def start(self) -> None:
        for local in range(self._request.processes):
            if self._told:
                return
            self._start(local)

    def _start(self, local: int) -> None:
        request, rank = self._request, self._request.rank(local)
        told = env_vars.process_variables(
            self._kept.address if self._kept else request.master or Address(LOOPBACK, 1),
            request.world_size,
            rank,
            local,
            heartbeat_timeout_seconds=request.heartbeat_timeout,
            initialization_timeout=request.start_timeout,
            restarts=self._restarts,
            port_is_kept=self._kept is not None,
        )
        variables = {**os.environ, **request.variables[local], **told, "PYTHONUNBUFFERED": "1"}
        command = ["module" if request.module else "file", request.target, *request.arguments]
        tag = f"[rank {rank}] " if request.world_size > 1 else ""
        worker = Worker(rank, command, variables, Log(request.log_dir, rank), tag)
        self._guardian.watch(worker.pid)
        self._workers.append(worker)
        worker.register(self._selector)

    # ---- until all have ended --------------------------------------------------------------------

    def wait(self) -> None:
        while self._running():
            self._tick()
            if self._told:
                self._stop_in_order()
            elif self._one_failed():
                self._end_the_others()

    def _one_failed(self) -> bool:
        return any(e.failed for e in self._ends.values())

    def _end_the_others(self) -> None:
        settle(self._running, self._tick)
        stopped = [w for w in self._left() if w.is_stopped()]
        self._stopped |= {w.rank for w in stopped}
        self._asked = {w.rank for w in self._left()}
        for worker in stopped:  # it hears nothing else
            kill_group(worker.pid)
        end(self._running, FAILED_GRACE, self._tick)

    def _stop_in_order(self) -> None:
        """Passes a signal on, once; a second one, or a process that fails, ends patience."""
        deadline = time.monotonic() + self._request.grace
        send(self._running(), self._told[0])
        while self._running() and time.monotonic() < deadline and len(self._told) == 1:
            self._tick()
            if self._one_failed():
                settle(self._running, self._tick)
                break
        self._note()  # who has gone was not killed, also where this program itself had stood
        self._asked = {w.rank for w in self._left()}
        for pid in self._running():
            kill_group(pid)
        while self._running():
            self._tick()

    def _tick(self) -> None:
        """Passes output on for a moment, and notes who has ended."""
        for key, _ in self._selector.select(TICK):
            if not key.data.pass_on():
                self._selector.unregister(key.fileobj)
        self._note()

    def _note(self) -> None:
        for worker in self._left():
            code = worker.code()
            if code is None:
                self._note_stopped(worker)
                continue
            kill_rest(worker.pid)  # what it started itself
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


def _memory_kills() -> int:
    """Processes that the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@contextmanager
def heard() -> Iterator[list[int]]:
    """SIGTERM and SIGINT are listed as they come, instead of ending this program at once."""
    told: list[int] = []

    def hear(number: int, frame: object) -> None:
        told.append(number)

    before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
