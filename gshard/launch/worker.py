"""One process of a launched job: started, its output passed on line by line, its log."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from gshard.processes.verdict import TAIL, Readable

_RUN = Path(__file__).with_name("script.py")
_JUDGED = 200  # lines; a stack of C++ is among them
_LONGEST = 2**16  # bytes of a line; a longer one is shown in pieces


class Worker:
    """A process, with its two pipes."""

    def __init__(
        self,
        rank: int,
        command: list[str],
        environment: dict[str, str],
        log: BinaryIO,
        tag: str,
    ):
        self.rank = rank
        self.tail = deque[str](maxlen=TAIL)  # as shown
        self.last = deque[str](maxlen=_JUDGED)  # all of it
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
        self._streams = [_Stream(pipe, to, tag, self) for pipe, to in pipes if pipe is not None]

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
        if self._process.returncode is not None:
            return False
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_status != signal.SIGCONT

    def register(self, selector: selectors.BaseSelector) -> None:
        """Lets a selector say when there is output."""
        for stream in self._streams:
            selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def write(self, raw: bytes) -> None:
        """Into the log, as it is."""
        self._log.write(raw)
        self._log.flush()

    def close(self) -> None:
        """Ends the log."""
        for stream in self._streams:
            stream.pipe.close()
        self._log.close()


class _Stream:
    """stdout or stderr of a worker: what came is shown line by line, with the rank in front."""

    def __init__(self, pipe: IO[bytes], to: TextIO, tag: str, worker: Worker):
        self.pipe = pipe
        self._to, self._tag, self._worker = to, tag, worker
        self._begun = b""
        self._readable = Readable()
        os.set_blocking(pipe.fileno(), False)

    def pass_on(self) -> bool:
        """What has come until now; whether more may come."""
        try:
            raw = os.read(self.pipe.fileno(), _LONGEST)
        except BlockingIOError:
            return True
        if raw:
            self._worker.write(raw)
        *lines, self._begun = (self._begun + raw).split(b"\n")
        if self._begun and (not raw or len(self._begun) >= _LONGEST):
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._show(line)
        return bool(raw)

    def _show(self, raw: bytes) -> None:
        # Of a progress bar that was drawn over and over, what one would see.
        line = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        self._worker.last.append(line)
        if not self._readable.shows(line):
            return
        self._worker.tail.append(line)
        print(f"{self._tag}{line}", file=self._to, flush=True)
