"""Watches the processes of a job on this machine: `spawn` and `gshard launch` both use it.

A job runs with all its processes or not at all. If one fails, processes that lost their connection
to it get time to fail too, so that their reasons are known; then the rest are ended, with SIGTERM
before SIGKILL.
A guardian kills whatever is left when this program itself is killed.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from gshard.distributed.launch.background_writer import say
from gshard.distributed.launch.exit_status import End
from gshard.distributed.launch.guardian import Guardian, kill_group, kill_rest
from gshard.distributed.launch.output import Lines, Stream
from gshard.distributed.unfinished import Work

_TICK = 0.05  # seconds that one look at the processes waits for news of them
_SETTLE = 2.0  # seconds in which those that lost a peer fail by themselves
_FAILED_GRACE = 3.0  # seconds that the others have when one has failed
_UNKILLABLE = 10.0  # seconds after SIGKILL
_LATE_EXIT = 40.0  # seconds after the end of a script; the watchdog speaks after 30, if it can


class Child(ABC):
    """A started process, which leads a group, and the pipes that it writes to."""

    def __init__(self, rank: int, pid: int, outputs: Mapping[Any, Stream], lines: Lines):
        self.rank: int = rank
        self.pid: int = pid
        self.lines: Lines = lines
        self.script_ended: float | None = None  # when, by the monotonic clock
        self._outputs = outputs

    @abstractmethod
    def exit_code(self) -> int | None:
        """Returns its exit code, a negative signal, or None while it runs."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the process has ended."""

    def readers(self) -> dict[IO[bytes] | int, Callable[[], bool]]:
        """Returns, for each pipe, the function that reads it and returns whether more may come."""
        return {pipe: stream.pass_on for pipe, stream in self._outputs.items()}

    def drain(self) -> None:
        """Reads what it wrote before it ended."""
        for stream in self._outputs.values():
            stream.drain()

    def work(self) -> Work:
        """Returns what it has to finish before it may be ended."""
        return Work()

    def text(self) -> str:
        """Returns the output that explains how it ended."""
        return "\n".join(self.lines.every)

    def close(self) -> None:
        """Closes its pipes."""
        for pipe in self._outputs:
            pipe.close()


class Supervisor:
    """The processes of a job on this machine, from their start to the end of the last.

    After `stop_limit` seconds a process that SIGSTOP has stopped is killed; never, if it is None.
    `meanwhile` is called all the time, whatever is waited for.
    """

    def __init__(
        self, stop_limit: float | None = None, meanwhile: Callable[[], object] = lambda: None
    ):
        self._meanwhile = meanwhile
        self.children: list[Child] = []
        self.ends: dict[int, End] = {}
        self._selector, self._guardian = selectors.DefaultSelector(), Guardian()
        self._began, self._stop_limit = time.monotonic(), stop_limit
        self._stopped_since: dict[int, float] = {}
        self._stopped, self._asked = set[int](), set[int]()
        self._said_late = False

    @property
    def running(self) -> list[Child]:
        """The processes that have not ended."""
        return [child for child in self.children if child.rank not in self.ends]

    @property
    def failed(self) -> bool:
        """Whether a process has failed."""
        return any(end.failed for end in self.ends.values())

    def add(self, child: Child) -> None:
        """Starts to watch a process, which then does not outlive this program."""
        self._guardian.watch(child.pid)
        self.children.append(child)
        for pipe, read in child.readers().items():
            self._selector.register(pipe, selectors.EVENT_READ, read)

    def tick(self) -> None:
        """Passes output on for a moment, and records which processes have ended."""
        for key, _ in self._selector.select(_TICK):
            if not key.data():
                self._selector.unregister(key.fileobj)
        self._note_ends()
        self._say_late_exits()
        self._meanwhile()

    def send(self, number: int) -> None:
        """Sends a signal to each process; it has no effect on those that have ended."""
        for child in self.running:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def settle(self) -> None:
        """Waits a moment after a failure, so that failures that follow from it are reported."""
        self._wait(_SETTLE)

    def let_finish(self, seconds: float, stop: Callable[[], object]) -> None:
        """Waits for saves that are under way, as long as the first process can commit them.

        It stops waiting when `stop()` is true, since somebody does not want to wait.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (0 in self.ends and self.ends[0].failed):
            if stop() or not any(child.work().running for child in self.running):
                break
            self.tick()

    def end_rest(self) -> None:
        """Ends all running processes: SIGTERM, and after 3 seconds SIGKILL to their groups."""
        stopped = [c for c in self.running if self._stop_limit is not None and is_stopped(c.pid)]
        self._stopped |= {child.rank for child in stopped}
        self._asked |= {child.rank for child in self.running}
        for child in stopped:  # it hears nothing else
            kill_group(child.pid)
        self.send(signal.SIGTERM)
        self._wait(_FAILED_GRACE)
        self.kill()

    def kill(self) -> None:
        """Kills all running processes and their groups, and waits for them."""
        self._note_ends()  # who has gone was not killed, also where this program itself had stood
        self._asked |= {child.rank for child in self.running}
        for child in self.running:
            kill_group(child.pid)
        late = time.monotonic() + _UNKILLABLE
        while self.running:
            self.tick()
            if time.monotonic() > late:
                late = math.inf
                say(
                    f"gshard: these processes were killed by SIGKILL {_UNKILLABLE:g} s ago and "
                    f"have not ended: {self._who()}. The kernel waits for a disk or a device that "
                    f"does not answer. `kill -9 {os.getpid()}` ends this program without them."
                )

    def close(self) -> None:
        """Ends everything that still runs, even after an error of this program itself."""
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
        """Waits until none runs or time is up; checks again, as this program may have slept."""
        deadline = time.monotonic() + seconds
        while self.running:
            late = time.monotonic() >= deadline
            self.tick()
            if late:
                break

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
                work=child.work(),
            )
            self._guardian.forget(child.pid)

    def _who(self) -> str:
        return ", ".join(f"rank {child.rank} (process id {child.pid})" for child in self.running)

    def _say_late_exits(self) -> None:
        """Says once that scripts have ended and none of their processes exits."""
        ended = [child.script_ended for child in self.running]
        late = time.monotonic() - _LATE_EXIT
        if self._said_late or not ended or any(x is None or x > late for x in ended):
            return
        self._said_late = True
        say(
            f"gshard: the scripts on this machine have ended, and {_LATE_EXIT:g} s later these "
            f"processes have not exited: {self._who()}. They wait for a thread, for an exit "
            "function, or at most 5 minutes for processes of other machines. "
            "`py-spy dump --native --pid ID` shows where."
        )

    def _kill_if_stopped(self, child: Child) -> None:
        """Kills a stopped process: like one that hangs, it counts as dead, even while it starts."""
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
