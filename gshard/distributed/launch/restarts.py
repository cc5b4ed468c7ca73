"""Decides whether a job that has failed starts again, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gshard.distributed.launch.exit_status import End, first_cause, hang, in_words, raised

_LONGEST = 60.0  # seconds before a restart
_SHOWN = 200  # characters of an error

# How an error begins that comes from outside the program, so that the next try may be without it:
# the network, a disk, a port, another machine, or an earlier job that still holds the checkpoints.
_OUTSIDE = re.compile(
    r"([\w.]+\.)?(OSError|IOError|ConnectionError|Connection\w+Error|BrokenPipeError|TimeoutError|"
    r"URLError|HTTPError|gaierror|NotArrivedError|PortTakenError|BarrierError|SaveFailedError|"
    r"OutsideError|FailedOutsideError|StorageError|InUseError)\b"
)
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


class Failure(NamedTuple):
    """How a job failed: of the process that failed first, and how far the job had come.

    Attributes:
      rank: that of the process.
      error: the error of the program, which another start may not repeat; empty for what came from
        outside, such as a signal or a lost machine.
      step: the number of its last step; None if it is not known.
      furthest: the largest number of a step of any process, and of a checkpoint; -1 for none.
    """

    rank: int
    error: str
    step: int | None
    furthest: tuple[int, int]

    @classmethod
    def of(cls, ends: Sequence[End]) -> Failure:
        """Returns the failure of a job whose processes ended so, or could not be started."""
        if not ends:
            return cls(-1, "", None, (-1, -1))
        first, (steps, saved) = first_cause(ends), furthest(ends)
        step = first.work.step
        if hang(ends) and steps >= 0:  # all end at once, and one may be a step ahead
            step = steps
        return cls(first.rank, error_of(first), step, (steps, saved))

    @property
    def at(self) -> str:
        """Where the process was, for messages."""
        known = "before a first step of make_train_step"
        return known if self.step is None else f"after step {self.step}"


def furthest(ends: Sequence[End]) -> tuple[int, int]:
    """The largest number of a step of any process, and of a checkpoint; -1 for none."""
    numbers = [(end.work.step, end.work.saved) for end in ends]
    steps, saved = zip(*numbers, strict=True) if numbers else ((), ())
    return (
        max((x for x in steps if x is not None), default=-1),
        max((x for x in saved if x is not None), default=-1),
    )


def error_of(end: End) -> str:
    """The error with which a process failed; empty if it came from outside its program."""
    how = in_words(end.code)
    if hang([end]):  # before the first step it may be a disk that does not answer
        return "" if end.work.step is None else "the job hangs"
    if end.follows or end.stopped:
        return ""
    if end.code < 0:
        return how if how.endswith(_CRASHES) else ""
    said = (raised(end.text) if end.code == 1 else "") or how
    return "" if _OUTSIDE.match(said) else said


class Decision(NamedTuple):
    """Whether the job starts again, after how many seconds, and why."""

    again: bool
    seconds: float
    why: str


class Restarts:
    """The restarts of one job: at most so many in a row without progress."""

    def __init__(self, most: int):
        self._most, self._row = most, 0
        self._last: Failure | None = None
        self._furthest = (-1, -1)

    def after(self, failure: Failure, *, same_machines: bool = True) -> Decision:
        """Decides after a failure; on other machines than before it is not the same again."""
        last, self._last = self._last, failure
        before, self._furthest = self._furthest, tuple(map(max, self._furthest, failure.furthest))
        progress = last is not None and self._furthest != before
        seen = last if same_machines else None
        if seen is not None and failure.error and not progress and _same(failure, seen):
            return Decision(
                False,
                0.0,
                f"rank {failure.rank} failed again {failure.at} with the same error, so it is a "
                f"bug or bad data, not a lost machine: {failure.error[:_SHOWN]}",
            )
        further = ""
        if progress:
            self._row = 0
            further = f", since it got further than before ({_progress(before, self._furthest)})"
        self._row += 1
        if self._row > self._most:
            if not self._most:
                return Decision(False, 0.0, "--max_restarts is 0")
            row = "1 restart" if self._most == 1 else f"{self._most} restarts in a row"
            why = f"{row} made no progress (--max_restarts {self._most})"
            return Decision(False, 0.0, why)
        seconds = min(2.0 ** (self._row - 1), _LONGEST)
        return Decision(True, seconds, f"{self._row} of {self._most}{further}")


def _same(one: Failure, other: Failure) -> bool:
    """Whether both are the same error at the same step; numbers in a message may differ."""
    errors = [re.sub(r"0x[0-9a-f]+|\d+", "0", failure.error) for failure in (one, other)]
    return one.step == other.step and errors[0] == errors[1]


def _progress(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    names = zip(("step", "checkpoint"), before, now, strict=True)
    return ", ".join(f"{name} {new} after {max(old, 0)}" for name, old, new in names if new > old)
