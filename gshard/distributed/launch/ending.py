"""Ending the processes of a job in order: asked first, killed when they do not go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from gshard.distributed.launch.guardian import kill_group

TICK = 0.05  # seconds that one look at the processes waits for news of them
FAILED_GRACE = 3.0  # seconds that the others have when one has failed
_SETTLE = 2.0  # seconds in which those that lost a peer fail by themselves


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each process; those that have ended do not mind."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def settle(running: Callable[[], list[int]], meanwhile: Callable[[], None]) -> None:
    """Waits a moment after a failure: those that follow from it say so, if they may."""
    _wait(running, _SETTLE, meanwhile)


def end(running: Callable[[], list[int]], grace: float, meanwhile: Callable[[], None]) -> None:
    """SIGTERM to all, and SIGKILL to the groups of those that are left after a while.

    Args:
      running: pids of the processes that have not ended; called again and again.
      grace: seconds between the two signals.
      meanwhile: called while waiting; takes some hundredths of a second.
    """
    send(running(), signal.SIGTERM)
    _wait(running, grace, meanwhile)
    for pid in running():
        kill_group(pid)
    while running():
        meanwhile()


def _wait(running: Callable[[], list[int]], seconds: float, meanwhile: Callable[[], None]) -> None:
    """Until none runs, or for a time, with a look after it: this program may itself have stood."""
    deadline = time.monotonic() + seconds
    late = False
    while running() and not late:
        late = time.monotonic() >= deadline
        meanwhile()
