"""Passes on the output of a job's process line by line, and keeps its last lines."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from gshard.distributed.launch.exit_status import TAIL, Readable

_JUDGED = 2000  # lines; a stack of C++ or a list of buffers is among them
_LONGEST = 2**16  # bytes of a line; a longer one is shown in pieces
_DRAIN = 0.5  # seconds; something else may hold the pipe and write for ever


class Lines:
    """The last lines of one process."""

    def __init__(self) -> None:
        self.shown: deque[str] = deque[str](maxlen=TAIL)  # those that a user should read
        self.every: deque[str] = deque[str](maxlen=_JUDGED)  # to find out how the process ended


class Stream:
    """Reads a pipe, such as a process's stderr: bytes go to `raw`, lines after `tag` to `to`."""

    def __init__(
        self, pipe: int, to: TextIO | None, tag: str, lines: Lines, raw: Callable[[bytes], object]
    ):
        self._pipe, self._to, self._tag = pipe, to, tag
        self._lines, self._raw = lines, raw
        self._begun, self._readable = b"", Readable()
        os.set_blocking(pipe, False)

    def pass_on(self) -> bool:
        """Passes on what has arrived; returns whether more may arrive."""
        raw = self._read()
        if raw is not None:
            self._take(raw)
        return raw != b""

    def drain(self) -> None:
        """Passes on what was written before the process ended, without waiting for more."""
        end = time.monotonic() + _DRAIN
        while raw := self._read():
            self._take(raw)
            if time.monotonic() >= end:
                break
        self._take(b"")

    def _read(self) -> bytes | None:
        """Reads some bytes; empty at the end, None if there are none yet."""
        try:
            return os.read(self._pipe, _LONGEST)
        except BlockingIOError:
            return None

    def _take(self, raw: bytes) -> None:
        if raw:
            self._raw(raw)
        *lines, self._begun = (self._begun + raw).split(b"\n")
        if self._begun and (not raw or len(self._begun) >= _LONGEST):
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._show(line)

    def _show(self, raw: bytes) -> None:
        # Of a progress bar that was drawn repeatedly, only what is visible at the end.
        line = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        self._lines.every.append(line)
        if not self._readable.shows(line):
            return
        self._lines.shown.append(line)
        if self._to is None:
            return
        try:
            known = self._to.encoding or "utf-8"  # a terminal may know few letters
            line = f"{self._tag}{line}".encode(known, "backslashreplace").decode(known)
            print(line, file=self._to, flush=True)
        except BlockingIOError:
            pass  # nobody reads fast enough: the log has it
        except (OSError, ValueError, AttributeError):  # nobody reads any more: the job goes on
            self._to = None
