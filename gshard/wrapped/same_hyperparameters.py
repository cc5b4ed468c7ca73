"""Checks that all processes use the same hyperparameters, which each sets by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from gshard._util.errors import GShardError
from gshard.distributed.agree import by_value, find_differences, first_difference, spans_processes
from gshard.sharding.plan import Plan


class SameHyperparameters:
    """Compares those of all calls so far at calls 1, 2, 4, 8, ... and when `compare` is called.

    So the cost vanishes in a long training, and a difference is found before the training is twice
    as long.

    Args:
      call: names a call in the error, such as `"set_lr"`.
      fix: what to do, in the error.
    """

    def __init__(self, call: str, fix: str) -> None:
        self._call, self._fix = call, fix
        self._calls = self._compared = 0
        self._lines: Sequence[str] = ()
        self._before = hashlib.blake2b(digest_size=8)  # of calls since the last comparison

    def add(self, plan: Plan, lines: Sequence[str]) -> None:
        """Counts a call that uses hyperparameters, and compares where it is due.

        Raises:
          GShardError: the processes differ, on all of them.
        """
        if not spans_processes(plan):
            return
        self._before.update("\n".join(self._lines).encode())
        self._lines = lines
        self._calls += 1
        if not self._calls & (self._calls - 1):
            self.compare(plan)

    def compare(self, plan: Plan) -> None:
        """Compares now, on all processes, also how many calls each has made.

        Raises:
          GShardError: the processes differ, on all of them.
        """
        if not spans_processes(plan):
            return
        since, self._compared = self._compared + 1, self._calls
        facts = {
            "calls": [str(self._calls)],
            "now": list(self._lines),
            "before": [self._before.hexdigest()],
        }
        self._before = hashlib.blake2b(digest_size=8)
        mesh: Any = plan.mesh
        if not (differing := find_differences("hyperparameters", facts, mesh)):
            return
        if "calls" in differing:
            given = by_value(first_difference(facts["calls"], mesh))
            what = f"have made different numbers of calls: {given}"
        elif "now" in differing:
            given = by_value(first_difference(facts["now"], mesh))
            what = f"have different hyperparameters: {given}"
        else:
            earlier = since if since == self._calls - 1 else f"{since} to {self._calls - 1}"
            what = f"had different hyperparameters in call {earlier}, and now have the same again"
        raise GShardError(f"{self._call}, call {self._calls}: the processes {what}. {self._fix}")
