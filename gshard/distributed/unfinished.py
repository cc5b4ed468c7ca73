"""Work that a process finishes before it exits with an error: a save that is under way.

`gshard launch` gives the processes of a job `--grace` seconds for it, also those that lost a peer.
It learns of such work from a file that each process appends to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gshard.distributed import env_vars

_TICK = 0.02  # seconds
_IDLE = 0.5  # seconds without work after which none is expected; one piece may follow another
_running: dict[object, str] = {}
_exiting = False


class Work(NamedTuple):
    """The work of one process, as the launcher reads it."""

    running: tuple[str, ...] = ()
    finished_late: tuple[str, ...] = ()  # after the process had failed
    cut_off: bool = False  # it had joined the others, and ended without its exit functions


@contextmanager
def finished_first(what: str) -> Iterator[None]:
    """Lets this process finish what the context does, such as `the save of step 3`."""
    key = object()
    _running[key] = what
    _tell(f"began {what}")
    try:
        yield
    finally:
        del _running[key]
        _tell(f"{'late' if _exiting else 'ended'} {what}")


def wait(began: float, most: float | None = None) -> None:
    """Waits until no work is left, for at most so many seconds after `began`.

    By default that is the launcher's `--grace`; without a launcher there is no limit.
    """
    grace = env_vars.read_integer(env_vars.GRACE) if most is None else most
    busy = time.monotonic()
    while (now := time.monotonic()) < busy + _IDLE and (grace is None or now < began + grace):
        busy = now if _running else busy
        time.sleep(_TICK)


def exits_with_error() -> None:
    """Notes that this process is to exit; what it finishes from now on is late."""
    global _exiting
    _exiting = True


def joined() -> None:
    """Tells the launcher that this process has joined the others of its job."""
    _tell("joined")


def left() -> None:
    """Tells the launcher that this process runs its exit functions."""
    _tell("left")


def is_exiting() -> bool:
    """Whether this process is to exit with an error."""
    return _exiting


def read_work(path: Path) -> Work:
    """Reads the work of a process from its file."""
    running: list[str] = []
    late: list[str] = []
    joined = False
    with suppress(OSError):
        for line in path.read_text().splitlines():
            verb, _, what = line.partition(" ")
            if verb in ("joined", "left"):
                joined = verb == "joined"
            elif verb == "began":
                running.append(what)
            elif what in running:
                running.remove(what)
                late += [what] if verb == "late" else []
    return Work(tuple(running), tuple(dict.fromkeys(late)), joined)


def _tell(line: str) -> None:
    path = os.environ.get(env_vars.STATUS_FILE)
    if path:
        with suppress(OSError), open(path, "a") as file:
            file.write(f"{line}\n")
