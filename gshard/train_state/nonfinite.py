"""The guard: steps whose gradient is not finite change nothing, are counted, and end a run."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gshard._util.errors import NonFiniteError

LATE = 2  # steps; a run may be this far ahead of what was looked at


class Guard(NamedTuple):
    """Counts in the train state, int32 scalars.

    Attributes:
      row: bad steps in a row.
      first: number of the step at which they began.
      skipped: steps that changed nothing, ever: bad ones, and those without weight.
    """

    row: Any
    first: Any
    skipped: Any

    @classmethod
    def new(cls) -> Guard:
        """Of a fresh state."""
        return cls(np.int32(0), np.int32(0), np.int32(0))

    def after(self, finite: jax.Array, updates: jax.Array, step: jax.Array) -> Guard:
        """The counts after step number `step`, whose gradient was finite, and which updates.

        A finite step that does not update had no weight, and says nothing about a row of bad ones.
        """
        first = jnp.where(finite | (self.row > 0), self.first, jnp.asarray(step, jnp.int32))
        row = jnp.where(updates, 0, self.row + ~finite)
        return Guard(row, first, self.skipped + ~updates)


class Watch:
    """Looks at the guard of each step a little later, so that no step waits for the host.

    A single process looks at a step as soon as it has ended, at the latest `LATE` steps after it.
    Several processes look exactly that late, so that all of them stop at the same step.
    """

    def __init__(self, most: int | None):
        self._most = most
        self._seen: deque[Guard] = deque()
        self._last: Any = None  # of the state that the last step returned

    def add(self, guard: Guard, after: Guard) -> None:
        """Remembers the guard of a step, and the same in the state that it returned.

        The first must not be donated later.
        """
        if self._most is not None and not isinstance(guard.row, core.Tracer):
            self._seen.append(guard)
            self._last = after.row

    def look(self, before: Guard) -> None:
        """Before a step with a state of this guard is started.

        Another state than the last step returned has its own history: a new start.

        Raises:
          NonFiniteError: after `most` bad steps in a row.
        """
        if before.row is not self._last:
            self._seen.clear()
        while self._seen and (len(self._seen) >= LATE or self._has_ended(self._seen[0])):
            guard = self._seen.popleft()
            row = int(guard.row)
            if self._most is not None and row >= self._most:
                self._seen.clear()
                raise NonFiniteError(
                    f"{row} step{'s in a row' if row > 1 else ''} had a gradient that is not "
                    f"finite, from step {int(guard.first)} on. They changed nothing: the state is "
                    "that before them. Look at the batches and the loss of that step "
                    "(jax_debug_nans finds the operation), lower the learning rate, or with "
                    "float16 pass scaler=gshard.GradScaler(). max_bad_steps= says how many are too "
                    "many."
                )

    def _has_ended(self, guard: Guard) -> bool:
        return jax.process_count() == 1 and guard.row.is_ready()
