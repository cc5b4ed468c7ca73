"""One process of a launched job: started, its output passed on line by line, its log."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

from gshard.distributed.launch.log import Log
from gshard.distributed.launch.output import Lines, Stream

_RUN = Path(__file__).with_name("script.py")


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
