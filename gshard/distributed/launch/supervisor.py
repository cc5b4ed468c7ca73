"""Watches the processes of a job on this machine: `spawn` and `gshard launch` both use it.

A job is all its processes or none. When one fails, those that lost their connection to it may fail
by themselves, so that their reasons are known; then the rest are ended, SIGTERM before SIGKILL.
A guardian kills whatever is left when this program itself is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from gshard.distributed.launch.exit_status import End
from gshard.distributed.launch.guardian import Guardian, kill_group, kill_rest
from gshard.distributed.launch.output import Lines, Stream

_TICK = 0.05  # seconds that one look at the processes waits for news of them
_SETTLE = 2.0  # seconds in which those that lost a peer fail by themselves
_FAILED_GRACE = 3.0  # seconds that the others have when one has failed


class Child(ABC):
    """A started process, and the pipes that it writes to.

    Attributes:
      rank: of the process in its job.
      pid: of the process, and of the group it leads.
      lines: the last lines that it wrote.
    """

    def __init__(self, rank: int, pid: int, outputs: Mapping[Any, Stream], lines: Lines):
        self.rank, self.pid, self.lines = rank, pid, lines
        self._outputs = outputs

    @abstractmethod
    def exit_code(self) -> int | None:
        """Its exit code, a negative signal, or None while it runs."""

    @abstractmethod
    def wait(self) -> None:
        """Returns once it has ended."""

    def readers(self) -> dict[IO[bytes] | int, Callable[[], bool]]:
        """By pipe, what reads from it when there is something; it returns whether more may come."""
        return {pipe: stream.pass_on for pipe, stream in self._outputs.items()}

    def drain(self) -> None:
        """Reads what it wrote before it ended."""
        for stream in self._outputs.values():
            stream.drain()

    def text(self) -> str:
        """What explains how it ended."""
        return "\n".join(self.lines.every)

    def close(self) -> None:
        """Closes its pipes."""
        for pipe in self._outputs:
            pipe.close()


class Supervisor:
    """The processes of a job on this machine, from their start to the end of the last.

    Args:
      stop_limit: seconds after which a process that a signal has stopped is killed; None leaves
        stopped processes alone.

    Attributes:
      children: those that were started, by rank.
      ends: how those that have ended did, by rank.
    """

    def __init__(self, stop_limit: float | None = None):
        self.children: list[Child] = []
        self.ends: dict[int, End] = {}
        self._guardian, self._selector = Guardian(), selectors.DefaultSelector()
        self._began, self._stop_limit = time.monotonic(), stop_limit
        self._stopped_since: dict[int, float] = {}
        self._stopped, self._asked = set[int](), set[int]()

    @property
    def running(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self.children if child.rank not in self.ends]

    @property
    def failed(self) -> bool:
        """Whether a process has failed."""
        return any(end.failed for end in self.ends.values())

    def add(self, child: Child) -> None:
        """From now on the process is watched, and does not outlive this program."""
        self._guardian.watch(child.pid)
        self.children.append(child)
        for pipe, read in child.readers().items():
            self._selector.register(pipe, selectors.EVENT_READ, read)

    def tick(self) -> None:
        """Passes output on for a moment, and notes who has ended."""
        for key, _ in self._selector.select(_TICK):
            if not key.data():
                self._selector.unregister(key.fileobj)
        self._note_ends()

    def send(self, number: int) -> None:
        """Sends a signal to each process; those that have ended do not mind."""
        for child in self.running:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def settle(self) -> None:
        """Waits a moment after a failure: those that follow from it say so, if they may."""
        self._wait(_SETTLE)

    def end_rest(self) -> None:
        """Ends all that run: SIGTERM, and SIGKILL to the groups of those left after 3 seconds."""
        stopped = [c for c in self.running if self._stop_limit is not None and is_stopped(c.pid)]
        self._stopped |= {child.rank for child in stopped}
        self._asked |= {child.rank for child in self.running}
        for child in stopped:  # it hears nothing else
            kill_group(child.pid)
        self.send(signal.SIGTERM)
        self._wait(_FAILED_GRACE)
        self.kill()

    def kill(self) -> None:
        """Kills all that run with their groups, and waits for them."""
        self._note_ends()  # who has gone was not killed, also where this program itself had stood
        self._asked |= {child.rank for child in self.running}
        for child in self.running:
            kill_group(child.pid)
        while self.running:
            self.tick()

    def close(self) -> None:
        """Leaves nobody behind, also after an error of this program itself."""
        try:
            for child in self.running:
                kill_group(child.pid)
                child.wait()
            for child in self.children:
                child.close()
            self._selector.close()
        finally:
            self._guardian.close()

    def _wait(self, seconds: float) -> None:
        """Until none runs, or for a time, with a look after it: this program may have stood."""
        deadline = time.monotonic() + seconds
        late = False
        while self.running and not late:
            late = time.monotonic() >= deadline
            self.tick()

    def _note_ends(self) -> None:
        for child in self.running:
            code = child.exit_code()
            if code is None:
                self._kill_if_stopped(child)
                continue
            kill_rest(child.pid)  # what it started itself
            child.drain()
            self.ends[child.rank] = End(
                child.rank,
                code,
                tuple(child.lines.shown),
                child.text(),
                time.monotonic() - self._began,
                stopped=child.rank in self._stopped,
                asked=child.rank in self._asked,
            )
            self._guardian.forget(child.pid)

    def _kill_if_stopped(self, child: Child) -> None:
        """A process that is stopped counts as dead as one that hangs does, also while it starts."""
        if self._stop_limit is None or not is_stopped(child.pid):
            self._stopped_since.pop(child.rank, None)
            return
        since = self._stopped_since.setdefault(child.rank, time.monotonic())
        if time.monotonic() - since > self._stop_limit:
            self._stopped.add(child.rank)
            kill_group(child.pid)


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped a child of this program that nobody has waited for."""
    if not hasattr(os, "waitid"):  # macOS
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended since it was last asked
        return False
    return found is not None and found.si_status != signal.SIGCONT
