"""Writes a launcher's output in threads, so that a reader who stops (`| less`) stops nothing else.

A pipe that nobody reads is full after 64 KiB, and a write to it waits for ever. The launcher has to
go on reading its processes, which would stop too, and to obey signals.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_MOST = 2**22  # characters that wait for the reader; more is dropped
_PIECE = 2**12  # bytes of one write, to see whether somebody reads
_PATIENCE = 1.0  # seconds without progress after which the program goes on
_PATIENCE_AT_END = 30.0  # the same at its end, unless it was told to stop


class BackgroundWriter:
    """A text stream that never waits: a thread writes to `to`, and what is too much is dropped.

    Once the reader reads again, a line says how many lines it has missed.
    """

    def __init__(self, to: TextIO):
        self._to = to
        self._begun = ""  # a line without its end
        self._waiting: list[str] = []
        self._size = self._dropped = 0
        self._progress = time.monotonic()
        self._changed = threading.Condition()
        self._writes = False  # the thread does, and has taken what it writes
        threading.Thread(target=self._run, name="gshard-output", daemon=True).start()

    def write(self, text: str) -> int:
        """Takes a text, or drops it."""
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            self._put(lines + end)
        return len(text)

    def _put(self, text: str) -> None:
        with self._changed:
            # After a line that was dropped none is kept, so that the gap is where it is said.
            if self._dropped or self._size + len(text) > _MOST:
                self._dropped += text.count("\n")
            else:
                self._waiting.append(text)
                self._size += len(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Does nothing: everything is written as soon as possible."""

    def drain(self, patience: Callable[[], float]) -> None:
        """Waits until everything is written, or for `patience()` seconds without progress."""
        if self._begun:
            text, self._begun = self._begun, ""
            self._put(text)
        with self._changed:
            self._progress = time.monotonic()
            while self._waiting or self._dropped or self._writes:
                self._changed.wait(0.05)
                if time.monotonic() > self._progress + patience():
                    break

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)

    def _run(self) -> None:
        text = ""
        while True:
            with self._changed:
                self._writes = False
                self._size -= len(text)  # only now: until it is written it takes memory
                self._changed.notify_all()
                while not self._waiting and not self._dropped:
                    self._changed.wait()
                text, self._waiting = "".join(self._waiting), []
                dropped, self._dropped = self._dropped, 0
                self._writes = True
            gap = ""
            if dropped:
                gap = (
                    f"gshard: {dropped:,} lines are not shown, since nobody read the output in "
                    "time. The logs have all.\n"
                )
            try:
                self._write_now(text + gap)
            except (OSError, ValueError):  # nobody reads any more: the job goes on
                pass

    def _write_now(self, text: str) -> None:
        try:
            number = self._to.fileno()
        except (OSError, AttributeError):  # a stream in memory
            self._to.write(text)
            self._to.flush()
            return
        # Not by the stream, whose lock the end of Python would wait for.
        raw = memoryview(text.encode(self._to.encoding or "utf-8", "backslashreplace"))
        while raw:
            try:
                raw = raw[os.write(number, raw[:_PIECE]) :]
            except BlockingIOError:
                select.select([], [number], [])
            self._progress = time.monotonic()


@contextmanager
def background_output(signals: Sequence[int]) -> Iterator[None]:
    """Makes `sys.stdout` and `sys.stderr` streams that never wait, until a signal or the end."""
    before = sys.stdout, sys.stderr
    try:
        for name, stream in zip(("stdout", "stderr"), before, strict=True):
            if stream is not None:
                stream.flush()
                setattr(sys, name, BackgroundWriter(stream))
        yield
    finally:
        drain_output(signals, _PATIENCE_AT_END)
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """Prints what the launcher itself says, after the output of the processes so far."""
    drain_output()
    with suppress(OSError, ValueError):  # nobody reads any more
        print(text, file=sys.stderr, flush=True)


def drain_output(signals: Sequence[int] = (), patience: float = _PATIENCE) -> None:
    """Waits until the output so far is written, as long as somebody reads."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BackgroundWriter):
            stream.drain(lambda: _PATIENCE if signals else patience)
