"""The processes that `gshard.distributed.spawn` has started: waited for, and ended together."""

from __future__ import annotations

import atexit
import math
import multiprocessing.connection
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.launch.child import Failure, Result
from gshard.distributed.launch.exit_status import End, first_cause, in_words, meaning
from gshard.distributed.launch.guardian import (
    FAILED_GRACE,
    TICK,
    Guardian,
    end,
    kill_rest,
    send,
    settle,
)
from gshard.distributed.launch.output import Lines, Log, Stream
from gshard.distributed.rendezvous import Kept

_STOP_GRACE = 30.0  # seconds to save and stop after SIGTERM


class ProcessFailedError(GShardError, RuntimeError):
    """A spawned process failed; its own exception is the cause, where it could be sent.

    Attributes:
      rank: of the first process that failed.
      exit_code: its exit code; a signal's number, negative, where one ended it.
    """

    def __init__(self, message: str, rank: int, exit_code: int):
        super().__init__(message)
        self.rank, self.exit_code = rank, exit_code


class Spawned:
    """What `gshard.distributed.spawn(..., join=False)` returns.

    Attributes:
      processes: by rank; each has `pid`, `exitcode`, `is_alive()`.
    """

    def __init__(
        self,
        processes: list[SpawnProcess],
        pipes: list[Connection],
        errors: list[Connection],
        guardian: Guardian,
        kept: Kept | None,
        daemon: bool,
    ):
        self.processes = processes
        self._pipes = dict(enumerate(pipes))
        self._errors, self._lines = errors, [Lines() for _ in errors]
        self._streams = {
            pipe.fileno(): Stream(pipe.fileno(), sys.stderr, "", lines, lambda raw: None)
            for pipe, lines in zip(errors, self._lines, strict=True)
        }
        self._guardian, self._kept = guardian, kept
        self._said: dict[int, Result | Failure] = {}
        self._ends: dict[int, End] = {}
        self._began, self._told = time.monotonic(), threading.Event()
        self._wanted, self._broken = False, list[BaseException]()
        # Results are read as they come, and a failure ends the others, whoever waits or not.
        self._watch = threading.Thread(
            target=self._run, name="gshard.distributed.spawn", daemon=True
        )
        self._watch.start()
        if daemon:  # multiprocessing would ask them to end, which JAX does not hear, and wait
            atexit.register(self.terminate)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the processes; whether all have ended.

        Args:
          timeout: seconds; None waits as long as it takes.

        Raises:
          ProcessFailedError: one failed. The others have been ended.
          SystemExit: with the code 75, when the job was told to stop and did so in order.
        """
        seconds = math.inf if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._passing_on_sigterm():
            # In turns, since Python handles a signal between them.
            while self._watch.is_alive() and time.monotonic() < deadline:
                self._watch.join(min(0.1, seconds))
        if self._watch.is_alive():
            return False
        self._raise()
        return True

    @property
    def results(self) -> list[Any]:
        """What the function returned, by rank; waits for all."""
        self.join()
        said = (self._said.get(rank) for rank in range(len(self.processes)))
        return [entry.value if isinstance(entry, Result) else None for entry in said]

    def terminate(self) -> None:
        """Ends all processes that still run: SIGTERM, and SIGKILL after three seconds."""
        self._wanted = self._watch.is_alive()
        self._told.set()
        self._watch.join()

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._left():
                self._tick()
                failed = any(e.failed for e in self._ends.values())
                if failed and not self._told.is_set():
                    settle(self._pids, self._tick)
                if failed or self._told.is_set():
                    self._told.set()
                    end(self._pids, FAILED_GRACE, self._tick)
        except BaseException as error:  # raised by whoever waits
            self._broken.append(error)
        finally:
            self._guardian.close()  # ends whatever is left
            for pipe in self._errors:
                pipe.close()
            if self._kept:
                self._kept.release()

    def _tick(self) -> None:
        sentinels = [self.processes[rank].sentinel for rank in self._left()]
        waited = [*self._pipes.values(), *self._streams, *sentinels]
        ready = multiprocessing.connection.wait(waited, TICK)
        for pipe in [pipe for pipe in self._streams if pipe in ready]:
            if not self._streams[pipe].pass_on():
                del self._streams[pipe]
        for rank, pipe in list(self._pipes.items()):
            if pipe.poll():
                self._hear(rank, pipe)
        for rank in self._left():
            process = self.processes[rank]
            if process.exitcode is None:
                continue
            if rank in self._pipes and self._pipes[rank].poll():
                self._hear(rank, self._pipes[rank])
            kill_rest(process.pid or 0)  # what it started itself
            self._ends[rank] = self._end(rank, process.exitcode)
            self._guardian.forget(process.pid or 0)

    def _end(self, rank: int, code: int) -> End:
        stream = self._streams.get(self._errors[rank].fileno())
        if stream:
            stream.drain()
        said, lines = self._said.get(rank), self._lines[rank]
        text = said.text if isinstance(said, Failure) else "\n".join(lines.every)
        seconds = time.monotonic() - self._began
        return End(rank, code, tuple(lines.shown), text, seconds, asked=self._told.is_set())

    def _hear(self, rank: int, pipe: Connection) -> None:
        try:
            self._said[rank] = pipe.recv()
        except (EOFError, OSError):  # it has ended, with or without a word
            pass
        except BaseException as error:  # what unpacking it does is the user's
            self._said[rank] = Failure(f"its result cannot be read: {error!r}", None, False)
        del self._pipes[rank]

    def _left(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self._ends]

    def _pids(self) -> list[int]:
        return [self.processes[rank].pid or 0 for rank in self._left()]

    # ---- the end ---------------------------------------------------------------------------------

    def _raise(self) -> None:
        if self._broken:
            raise self._broken[0]
        codes = {end.code for end in self._ends.values()}
        unread = [(r, s) for r, s in self._said.items() if isinstance(s, Failure)]
        if self._wanted or (codes == {0} and not unread):
            return
        if codes <= {0, PREEMPTED_EXIT_CODE} and not unread:
            raise SystemExit(PREEMPTED_EXIT_CODE)
        failed = [end for end in self._ends.values() if end.code]
        first = first_cause(failed) if failed else self._ends[unread[0][0]]
        said = self._said.get(first.rank)
        of = f"process {first.rank} of {len(self.processes)}"
        if isinstance(said, Failure):
            message = f"{of} failed:\n\n{said.text}"
            raise ProcessFailedError(message, first.rank, first.code) from _unpacked(said.error)
        message = f"{of} {in_words(first.code)} after {first.seconds:.1f} s. {meaning(first)}"
        if first.code == 1 and not first.tail:
            message += "It failed before the function ran: what it said is above."
        if first.tail:
            message += "\nIts last lines on stderr:\n" + "\n".join(first.tail)
        raise ProcessFailedError(message.strip(), first.rank, first.code)

    @contextmanager
    def _passing_on_sigterm(self) -> Iterator[None]:
        """While the main thread waits, SIGTERM is for the processes: they save and stop."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def hear(number: int, frame: object) -> None:
            send(self._pids(), signal.SIGTERM)
            patience = threading.Timer(_STOP_GRACE, self._told.set)
            patience.daemon = True
            patience.start()

        signal.signal(signal.SIGTERM, hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unpacked(error: bytes | None) -> BaseException | None:
    """The child's exception, where its type can be made here."""
    try:
        found = None if error is None else ForkingPickler.loads(error)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:  # such as one whose arguments are not its message
        return None
    return found if isinstance(found, BaseException) else None


_RUN = Path(__file__).with_name("run_script.py")


class Worker:
    """A process, with its two pipes."""

    def __init__(
        self,
        rank: int,
        command: list[str],
        environment: dict[str, str],
        log: Log,
        tag: str,
    ):
        self.rank, self.lines = rank, Lines()
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(_RUN), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to end what it starts itself too
        )
        pipes = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        self._streams = {
            pipe: Stream(pipe.fileno(), to, tag, self.lines, log.write)
            for pipe, to in pipes
            if pipe is not None
        }

    @property
    def pid(self) -> int:
        """Of the process, and of the group it leads."""
        return self._process.pid

    def code(self) -> int | None:
        """Its exit code, a negative signal, or None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

    def is_stopped(self) -> bool:
        """Whether a signal stopped it; it can be continued."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):  # macOS
            return False
        try:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has ended since it was last asked
            return False
        return found is not None and found.si_status != signal.SIGCONT

    def register(self, selector: selectors.BaseSelector) -> None:
        """Lets a selector say when there is output."""
        for pipe, stream in self._streams.items():
            selector.register(pipe, selectors.EVENT_READ, stream)

    def drain(self) -> None:
        """Passes on what it wrote before it ended."""
        for stream in self._streams.values():
            stream.drain()

    def close(self) -> None:
        """Ends the log."""
        for pipe in self._streams:
            pipe.close()
        self._log.close()
