"""`profile`: a trace of exactly these steps, by JAX's profiler."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Any, Self

import jax

from gshard._util import events
from gshard._util.errors import CallOrderError, GShardError, warn
from gshard._util.validation import check_integer, shown
from gshard.checkpoint.disk import as_directory

ANNOTATION = "train"  # of each step in the trace, with its number


def profile(steps: tuple[int, int], directory: str | os.PathLike[str] = "profile") -> StepProfile:
    """Records a trace of some steps of `make_train_step`, with no other change to the script.

    Call it before the loop. It waits for the steps before, so that the trace has these steps alone,
    each under the name `train` with its number. In several processes the first one records.

    Args:
      steps: numbers of the first and of the last step to record, as the train state counts them,
        from 1.
      directory: where the trace goes, made if missing: open it with XProf, or in Perfetto.

    Returns:
      The profile, which is also a context manager: it is stopped at the end of the block, or of the
      script. It warns if the steps were not reached.

    Raises:
      GShardError: the range is reversed, or an argument is not valid.
      CallOrderError: another profile is of the same steps.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> step = gshard.make_train_step(loss_fn, plan)
      >>> with gshard.profile(steps=(2, 3), directory="trace"):
      ...     for _ in range(3):
      ...         state, info = step(state, batch)
      profile of steps 2 to 3: .../trace
    """
    try:
        first, last = steps
    except (TypeError, ValueError):
        raise GShardError(
            f"steps={shown(steps)} must be the first and the last step, such as (10, 13)."
        ) from None
    first = check_integer("steps[0]", first, 1)
    last = check_integer("steps[1]", last, 1)
    if first > last:
        raise GShardError(f"steps=({first}, {last}) ends before it begins. Pass ({last}, {first}).")
    for other in events.observers:
        if isinstance(other, StepProfile) and other.first <= last and first <= other.last:
            raise CallOrderError(
                f"steps=({first}, {last}): the {other} has some of these steps, and JAX records "
                "one trace at a time. Choose others."
            )
    found = StepProfile(first, last, directory)
    events.observers.append(found)
    return found


class StepProfile:
    """The profile that `profile` returns.

    Attributes:
      first: number of the first step to record.
      last: number of the last one.
      directory: where the trace goes.
    """

    def __init__(self, first: int, last: int, directory: str | os.PathLike[str]):
        self.first: int = first
        self.last: int = last
        self.directory: Any = as_directory(directory)
        self._is_recording = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._latest: Any = None  # a result of the last step
        self._number: int | None = None  # of the last step
        self._begins = first  # at which step the trace does
        atexit.register(self.close)

    def __str__(self) -> str:
        one = self.first == self.last
        return (
            f"profile of step {self.first}"
            if one
            else f"profile of steps {self.first} to {self.last}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def before(self, number: int) -> None:
        """Starts the trace before the first of the steps."""
        if jax.process_index() != 0:
            self._end()
        elif self.first <= number <= self.last:
            if not self._is_recording:
                if not self._start():
                    return
                self._begins = number
            self._annotate(jax.profiler.StepTraceAnnotation(ANNOTATION, step_num=number))
        elif number > self.last:  # of a run that was resumed
            self._number = number - 1
            self.close()

    def after(self, number: int, calls: int, skipped: tuple[Any, Any]) -> None:
        """Stops the trace after the last of the steps."""
        self._number, self._latest = number, skipped[1]
        if self._is_recording:
            self._annotate(None)
            if number >= self.last:
                self.close()

    def ran(self, step: Any, batch: Any, info: dict[str, Any]) -> None:
        """Does nothing: which step it was does not matter."""

    def close(self) -> None:
        """Stops recording; warns if some of the steps were not reached."""
        if self not in events.observers:
            return
        self._end()
        reached = f"the last step was {self._number}" if self._number else "no step ran"
        if not self._is_recording:
            warn(f"the {self} recorded nothing: {reached}. {_COUNTED}")
            return
        self._is_recording = False
        self._annotate(None)
        jax.block_until_ready(self._latest)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a full disk, or the user has stopped it
            warn(f"the {self} was not written: {error}. Training goes on.")
            return
        with suppress(OSError, ValueError):  # nobody reads, or the disk is full
            print(f"{self}: {self.directory}", flush=True)
        if self._begins > self.first:
            warn(f"the {self} is not complete: it begins at step {self._begins}.")
        if self._number is None or self._number < self.last:
            warn(f"the {self} is not complete: {reached}.")

    def _start(self) -> bool:
        jax.block_until_ready(self._latest)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.directory))
        except (OSError, RuntimeError) as error:
            self._end()
            warn(f"the {self} recorded nothing: {error}. Training goes on without it.")
            return False
        self._is_recording = True
        return True

    def _annotate(self, annotation: jax.profiler.StepTraceAnnotation | None) -> None:
        if self._annotation is not None:  # also that of a step that failed
            self._annotation.__exit__(None, None, None)
        self._annotation = annotation
        if annotation is not None:
            annotation.__enter__()

    def _end(self) -> None:
        if self in events.observers:
            events.observers.remove(self)
        atexit.unregister(self.close)


_COUNTED = "Steps are those of gshard.make_train_step, with the numbers of the train state."
