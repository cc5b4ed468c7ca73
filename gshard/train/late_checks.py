"""Checks of what a step computed, made on the host two calls later so that no step waits for it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from gshard._util.errors import GShardError
from gshard.sharding.plan import Plan
from gshard.train_state.nonfinite import LATE

_ADVICE = (
    "Restore the last checkpoint: this state cannot be saved, and all further calls of steps with "
    "its plan are refused."
)


class LateChecks:
    """The checks of all steps of a plan that are due. All processes make them at the same call.

    `order` is a number of the order in which other programs of the plan were called.

    A check returns what is wrong, or an empty string. Once something is, every later call raises.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._due: deque[tuple[int, Callable[[], str]]] = deque()
        self._fault = ""
        self.order: int = 0

    def add(self, check: Callable[[], str]) -> None:
        """Adds a check of the call that has just begun."""
        self._due.append((self._calls, check))

    def end_call(self) -> None:
        """Counts a call of a step."""
        self._calls += 1

    def look(self, late: int = LATE) -> None:
        """Makes the checks of the calls that began `late` calls ago; with 0 it waits for all.

        Raises:
          GShardError: one of them, or of those before, found something wrong.
        """
        while self._due and self._calls - self._due[0][0] >= late and not self._fault:
            self._fault = self._due.popleft()[1]()
        if self._fault:
            raise GShardError(f"{self._fault} {_ADVICE}")

    def forget(self) -> None:
        """Forgets what was found and what is due."""
        self._due.clear()
        self.order = 0
        self._fault = ""


_checks: weakref.WeakKeyDictionary[Plan, LateChecks] = weakref.WeakKeyDictionary()


def late_checks(plan: Plan) -> LateChecks:
    """Returns the checks of a plan."""
    return _checks.setdefault(plan, LateChecks())
