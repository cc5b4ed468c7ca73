"""What this process tells `gshard launch`: events, and the number of its last step.

The launcher names a file. Its first line is the number of the last step, and whether this process
has joined the others. It is overwritten in place in a memory map, so that a step makes no system
call and a full disk loses nothing; a killed process leaves it behind. Each line after it is an
event in JSON.

Metrics and profiles observe the train steps here too.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import jax
from jax import core

STATUS_FILE = "GSHARD_STATUS_FILE"
WIDTH = 20  # characters of the number of the last step
JOINED = b"+"  # the character after it, from joining the others to the exit functions
FIRST_LINE = b"".ljust(WIDTH + 1) + b"\n"  # of a new file

_EXIT_TIMEOUT = 10.0  # seconds that a script waits at its end for the result of its first step
_LONG_COMPILATION = 1.0  # seconds; of the programs of gshard's own every one is told

observers: list[Observer] = []  # of all train steps of this process
calling = ""  # the program of gshard that is being called
_restores = 0
_has_stepped = False


def now() -> str:
    """The time as events and logs have it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tell(event: str, step: int | None = None, seconds: float | None = None, **more: Any) -> None:
    """Tells the launcher of an event; does nothing without one.

    Args:
      event: its name, such as `save`.
      step: the number of the step that it belongs to.
      seconds: how long it took.
      **more: anything else that JSON holds.
    """
    if not _path:
        return
    said = {"time": now(), "event": event, "step": step, "seconds": rounded(seconds), **more}
    said = {name: value for name, value in said.items() if value is not None}
    with suppress(OSError), open(_path, "ab") as file:
        # An earlier line may have been cut off, by a disk that was full.
        file.write(b"\n" + json.dumps(said).encode() + b"\n")


def rounded(seconds: float | None) -> float | None:
    """Seconds with milliseconds."""
    return None if seconds is None else round(seconds, 3)


def tell_joined(joined: bool) -> None:
    """Tells the launcher that this process joins the others, or runs its exit functions."""
    if _map is not None:
        _map[WIDTH : WIDTH + 1] = JOINED if joined else b" "
    tell("join" if joined else "leave", last_step())


def restored(step: int, seconds: float) -> None:
    """Tells of a restored checkpoint, from whose step train steps count on."""
    global _restores
    _restores += 1
    tell("restore", step, seconds)


class Observer(Protocol):
    """What wants to know of the calls of train steps; not of those inside a trace of the user's."""

    def before(self, number: int) -> None:
        """Called before the step of this number begins."""

    def after(self, number: int, calls: int, skipped: tuple[Any, Any]) -> None:
        """Called once the step was given to the devices.

        Args:
          number: that of the step; a step that is known to have been skipped has none.
          calls: the number of steps including all that were skipped.
          skipped: how many steps were skipped before this one, and with it. The latter is a small
            array that is there once the devices have finished the step.
        """

    def ran(self, step: Any, batch: Any, info: dict[str, Any]) -> None:
        """Called after that with the train step, its global batch, and what it returns."""


def ran(step: Any, batch: Any, info: dict[str, Any]) -> None:
    """Tells the observers which train step has just run, on which batch, and what it returns."""
    for observer in list(observers):
        observer.ran(step, batch, info)


class StepNumber:
    """The number of the last step of a train step, counted without waiting for the devices."""

    def __init__(self) -> None:
        self._number, self._calls, self._restores, self._began = 0, 0, -1, 0.0
        self._skipped: Any = 0

    def begin(self, step: Any, skipped: Any = 0, is_other: bool = False) -> None:
        """Begins a call.

        At the first one, after a restore, and with a state that the last call did not return,
        `step` is the number before it, and `skipped` that of the steps skipped until then.
        """
        if _map is None and not observers:
            self._restores = -1  # whoever asks later begins with the number of then
            return
        if isinstance(step, core.Tracer):
            return
        if is_other or self._restores != _restores:
            self._restores, self._number, self._began = _restores, int(step), time.monotonic()
            self._skipped = int(skipped)
            self._calls = self._number + self._skipped
        for observer in list(observers):
            observer.before(self._number + 1)

    def end(self, skipped: Any) -> None:
        """Ends a call; `skipped` is there once the devices have finished it."""
        if self._restores < 0:
            return
        self._number, self._calls = self._number + 1, self._calls + 1
        if _map is not None:
            _map[:WIDTH] = b"%20d" % self._number
            if not _has_stepped:
                self._first(skipped)
        both, self._skipped = (self._skipped, skipped), skipped
        for observer in list(observers):
            observer.after(self._number, self._calls, both)

    def skipped(self, step: int, row: int, leaves: Callable[[], str], counted: bool = True) -> None:
        """Tells of a step that changed nothing since its gradient was not finite.

        `counted`: whether the number of the current state includes it.
        """
        if counted and self._restores >= 0:
            self._number -= 1
        if _map is not None:
            tell("skip", step, row=row, leaves=leaves() or None)

    def _first(self, result: Any) -> None:
        global _has_stepped
        _has_stepped = True
        step, began = self._number, self._began

        def wait() -> None:
            with suppress(Exception):  # it failed: whoever reads the result learns of that
                jax.block_until_ready(result)
                tell("first_step", step, time.monotonic() - began)

        thread = threading.Thread(target=wait, name="gshard-first-step", daemon=True)
        thread.start()
        # Python ends a daemon inside of XLA by an exception, which aborts the process.
        atexit.register(thread.join, _EXIT_TIMEOUT)


def last_step() -> int | None:
    """The number of the last step; None if it is not known."""
    text = b"" if _map is None else _map[:WIDTH].strip()
    return int(text) if text else None


def _mapped() -> mmap.mmap | None:
    """The first line of the file; None without a launcher."""
    with suppress(OSError, ValueError), open(_path, "r+b") as file:
        return mmap.mmap(file.fileno(), len(FIRST_LINE))
    return None


def _compiled(event: str, duration_secs: float, **more: Any) -> None:
    if event.endswith("backend_compile_duration"):
        if calling or duration_secs >= _LONG_COMPILATION:
            tell("compile", last_step(), duration_secs, what=calling or more.get("fun_name"))


_path = os.environ.pop(STATUS_FILE, "")  # programs that this one starts have other steps
_map = _mapped() if _path else None
if _map is not None:
    jax.monitoring.register_event_duration_secs_listener(_compiled)
