"""The guard: skips and counts steps whose gradient is not finite, and ends a run of too many."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gshard._util.errors import NonFiniteError

LATE = 2  # number of steps that a run may be ahead of the last guard that was checked


class Guard(NamedTuple):
    """Counts of skipped steps in the train state, int32 scalars.

    Attributes:
      row: number of non-finite steps in a row.
      first: number of the step at which they began.
      skipped: number of all steps that changed nothing: non-finite ones, and those of weight 0.
    """

    row: Any
    first: Any
    skipped: Any

    @classmethod
    def new(cls) -> Guard:
        """Makes the guard of a new state."""
        return cls(np.int32(0), np.int32(0), np.int32(0))

    def after(self, finite: jax.Array, updates: jax.Array, step: jax.Array) -> Guard:
        """Returns the counts after a step.

        A finite step that does not update has weight 0; it neither extends nor ends a row of
        non-finite steps.

        Args:
          finite: boolean scalar, whether the gradient was finite.
          updates: boolean scalar, whether the step updates the state.
          step: number of the step.
        """
        first = jnp.where(finite | (self.row > 0), self.first, jnp.asarray(step, jnp.int32))
        row = jnp.where(updates, 0, self.row + ~finite)
        return Guard(row, first, self.skipped + ~updates)


class Watch:
    """Checks the guard of each step with a delay, so that no step waits for the host.

    A single process checks a step as soon as it has ended, at the latest `LATE` steps after it.
    Several processes check exactly `LATE` steps after it, so that all stop at the same step.
    """

    def __init__(self, most: int | None):
        self._most = most
        self._seen: deque[Guard] = deque()
        self._last: Any = None  # of the state that the last step returned

    def add(self, guard: Guard, after: Guard) -> None:
        """Records the guard of a step, and its copy in the state that the step returned.

        `guard` must not be donated later.
        """
        if self._most is not None and not isinstance(guard.row, core.Tracer):
            self._seen.append(guard)
            self._last = after.row

    def look(self, before: Guard) -> None:
        """Checks earlier steps, before a step starts with a state that has the guard `before`.

        A state that the last step did not return has a history of its own: recorded guards are
        dropped.

        Raises:
          NonFiniteError: `most` steps in a row were not finite.
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
