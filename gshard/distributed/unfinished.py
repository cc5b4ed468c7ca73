"""Work that a process finishes before it exits with an error: a save that is under way.

`gshard launch` gives the processes of a job `--grace` seconds for it, also those that lost a peer.
It learns of such work from the events that each process tells it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from gshard._util.events import tell
from gshard.distributed import env_vars

_TICK = 0.02  # seconds
_IDLE = 0.5  # seconds without work after which none is expected; one piece may follow another
_BEGIN = "_begin"
_running: dict[object, str] = {}
_exiting = False


class Work(NamedTuple):
    """The work of one process, as the launcher reads it.

    Attributes:
      running: saves that are under way.
      finished_late: those that ended after the process had failed.
      cut_off: it had joined the others, and ended without its exit functions.
      saved: the step of the newest checkpoint for which it has written its files.
      step: the number of its last step.
    """

    running: tuple[str, ...] = ()
    finished_late: tuple[str, ...] = ()
    cut_off: bool = False
    saved: int | None = None
    step: int | None = None

    def after(self, event: Mapping[str, Any]) -> Work:
        """Returns the work after the process has told of an event."""
        kind, what, step = (event.get(name) for name in ("event", "what", "step"))
        if str(kind).endswith(_BEGIN):
            return self._replace(running=(*self.running, what))
        if what not in self.running:
            return self
        running = list(self.running)
        running.remove(what)
        late = [x for x in [what] if event.get("late") and x not in self.finished_late]
        saved = step if kind == "save" and "error" not in event else self.saved
        return self._replace(
            running=tuple(running), finished_late=(*self.finished_late, *late), saved=saved
        )


@contextmanager
def finished_first(what: str, kind: str = "save", step: int | None = None) -> Iterator[Any]:
    """Lets this process finish what the context does, such as `the save of step 3`.

    The launcher is told of the events `save_begin` and `save`; the latter has also what the context
    puts into the dictionary that it is given.
    """
    key, began, more = object(), time.monotonic(), dict[str, Any]()
    _running[key] = what
    tell(f"{kind}{_BEGIN}", step, what=what)
    try:
        yield more
    finally:
        del _running[key]
        tell(kind, step, time.monotonic() - began, what=what, late=_exiting or None, **more)


def wait(began: float, most: float | None = None) -> None:
    """Waits until no work is left, for at most `most` seconds after `began`.

    By default that is the launcher's `--grace`; without a launcher there is no limit.
    """
    grace = env_vars.read_integer(env_vars.GRACE) if most is None else most
    busy = time.monotonic()
    while grace is None or time.monotonic() < began + grace:
        now = time.monotonic()
        if _running:  # first: this thread may have had no turn for longer than `_IDLE`
            busy = now
        elif now >= busy + _IDLE:
            break
        time.sleep(_TICK)


def exits_with_error() -> None:
    """Notes that this process is to exit; what it finishes from now on is late."""
    global _exiting
    _exiting = True


def is_exiting() -> bool:
    """Whether this process is to exit with an error."""
    return _exiting
