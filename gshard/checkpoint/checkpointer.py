"""`Checkpointer`: saves in the background, restores anywhere, and trusts no byte unchecked."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import jax

from gshard.arguments import flag, shown, whole_number
from gshard.checkpoint.description import Description, as_metadata, packed_data_state
from gshard.checkpoint.directory import as_directory, steps_in
from gshard.checkpoint.errors import SaveFailedError
from gshard.checkpoint.keep import Keep
from gshard.checkpoint.leaves import arrays_of, restored, split_like
from gshard.checkpoint.manifest import Damage, damages
from gshard.checkpoint.reader import data_state as read_data_state
from gshard.checkpoint.reader import existing, undamaged
from gshard.checkpoint.storage import read
from gshard.checkpoint.writer import Contents, Writer
from gshard.errors import CallOrderError, GShardError, warn
from gshard.host import plan_of

P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(
    method: Callable[Concatenate[Checkpointer, P], R],
) -> Callable[Concatenate[Checkpointer, P], R]:
    """A method that waits while another thread is in one: who saves owns all that is half done."""

    @functools.wraps(method)
    def alone(self: Checkpointer, *arguments: P.args, **options: P.kwargs) -> R:
        with self._turn:
            return method(self, *arguments, **options)

    return alone


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
      step: its number.
      state: the train state, lying as the plan of `like` says.
      data_state: what this process gave `save`, or None.
      metadata: what `save` was given.
    """

    step: int
    state: Any
    data_state: Any
    metadata: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run, in one directory.

        with gshard.Checkpointer("checkpoints", keep_last=3) as checkpointer:
            if checkpointer.latest_step() is not None:
                state = checkpointer.restore(like=state).state
            for batch in batches:
                state, metrics = step(state, batch)
                checkpointer.save(int(state.step), state)

    With several processes all of them make one for the same directory, which they all see, and
    make the same calls.

    Args:
      directory: made by the first save.
      keep_last: this many of the newest steps stay.
      keep_every: steps whose number it divides stay too.
      keep_best: this many of the best steps stay too, by `metric`. With none of these three, all
        stay.
      metric: the key of `metadata` that says how good a step is.
      mode: `"min"` or `"max"`: which metric is best.
      asynchronous: `save` returns when the arrays are copied to the host, and the next call waits
        for the rest. If not, it returns when the step is on the disk.
      on_failure: `"raise"` a `SaveFailedError` when a step could not be written, or `"warn"` and
        train on.

    Raises:
      GShardError: for arguments that cannot be.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: str = "min",
        asynchronous: bool = True,
        on_failure: str = "raise",
    ):
        self.directory = as_directory(directory)
        keep = Keep(keep_last, keep_every, keep_best, metric, mode)
        self._asynchronous = flag("asynchronous", asynchronous)
        if on_failure not in ("raise", "warn"):
            raise GShardError(f"on_failure={shown(on_failure)} must be 'raise' or 'warn'.")
        self._warns = on_failure == "warn"
        self._writer = Writer(self.directory, keep)
        self._closed = False
        self._turn = threading.RLock()

    def all_steps(self) -> list[int]:
        """The steps that are complete, ascending. What is being saved is none yet."""
        return steps_in(self.directory)

    def latest_step(self) -> int | None:
        """The newest step that is complete, or None."""
        return max(self.all_steps(), default=None)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """What `save` was given as the metadata of a step; of the newest by default."""
        return dict(Description.read(self.directory / str(self._one(step))).metadata)

    def verify(self, step: int | None = None) -> list[Damage]:
        """Reads every byte of a step, of the newest by default.

        Returns:
          What is not as it was written, by file and array; empty for an undamaged step.
        """
        return damages(self.directory / str(self._one(step)))

    @one_at_a_time
    def save(
        self,
        step: int,
        state: Any,
        *,
        data_state: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a train state as a step.

        When this returns the state may be trained on and given away: it is copied. Each process
        copies and writes its own parts, nothing is gathered.

        Args:
          step: its number, larger than those that are there.
          state: of `shard_train_state`, at any level; for NNX the `(model, optimizer)` pair.
          data_state: where the data is, such as `loader.state_dict()`: JSON or bytes, each
            process's own.
          metadata: about the step: numbers, texts, lists and dictionaries of these; the first
            process's counts.

        Raises:
          SaveFailedError: this step, or the one before, could not be written. Steps before are as
            they were, and `save` may be called again.
          GShardError: for a state, a step or metadata that cannot be saved; nothing was written.
        """
        self._refuse_closed()

        def contents() -> Contents:
            number = whole_number("step", step, 0)
            plan = plan_of(state, "save(step, state)")
            arrays, leaves = arrays_of(state, plan)
            data = None if data_state is None else packed_data_state(data_state)
            description = Description.of(number, leaves, plan, as_metadata(metadata))
            return Contents(description, arrays, data)

        self.wait()
        try:
            self._writer.begin(contents)
            if not self._asynchronous:
                self._writer.wait()
        except SaveFailedError as error:
            self._tell(error)

    @one_at_a_time
    def wait(self) -> None:
        """Waits until the last save is a step, on the disk.

        Raises:
          SaveFailedError: it could not be written; with `on_failure="warn"` a warning says so.
        """
        try:
            self._writer.wait()
        except SaveFailedError as error:
            self._tell(error)

    @one_at_a_time
    def delete(self, step: int) -> None:
        """Deletes a step: it is none any more at once, then its files go.

        Raises:
          GShardError: there is no such step, or it cannot be deleted.
        """
        self._refuse_closed()
        self.wait()
        self._writer.delete(existing(self.directory, step, self.all_steps()))

    @one_at_a_time
    def restore(
        self, step: int | None = None, *, like: Any = None, verify: bool = True, cast: bool = False
    ) -> Restored:
        """Reads a step onto any mesh, at any level, with any number of processes.

        Each process reads what its devices need.

        Args:
          step: which; None: the newest that is as it was written. Damaged ones are named in a
            warning and passed over; the next save sets them aside.
          like: what `shard_train_state` returned: the state, or `(abstract state, plan)`, which
            holds no arrays. An NNX `(model, optimizer)` is changed in place, and returned.
          verify: False does not compare the files with their checksums.
          cast: True converts arrays of another dtype.

        Raises:
          DamagedCheckpointError: the step asked for is damaged, or all are.
          GShardError: there is no such step, or it is of another model: each array that differs,
            by its path.
        """
        self._refuse_closed()
        state, plan = split_like(like, "restore(like=...)")
        flag("verify", verify)
        flag("cast", cast)
        self.wait()
        steps = self.all_steps()
        asked = None if step is None else existing(self.directory, step, steps)
        number, damaged = undamaged(self.directory, asked, steps, verify)
        self._writer.damaged |= damaged
        folder = self.directory / str(number)
        description = Description.read(folder)
        try:
            new = restored(functools.partial(read, folder), description.leaves, state, plan, cast)
        except GShardError as error:
            raise GShardError(f"{folder}: {error}") from error
        data = read_data_state(folder, description.processes)
        return Restored(number, new, data, dict(description.metadata))

    @one_at_a_time
    def close(self) -> None:
        """Waits for the last save, and lets another one write into the directory."""
        self._closed = True
        try:
            self._writer.close()
        except SaveFailedError as error:
            self._tell(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and jax.process_count() > 1 and self._writer.busy:
            return  # the others may never come to compare; the thread ends what can be ended
        self.close()

    def _one(self, step: int | None) -> int:
        if step is not None:
            return existing(self.directory, step, self.all_steps())
        newest = self.latest_step()
        if newest is None:
            raise GShardError(f"{self.directory} holds no checkpoint.")
        return newest

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CallOrderError("this Checkpointer is closed. Make another one.")

    def _tell(self, error: SaveFailedError) -> None:
        if not self._warns:
            raise error
        warn(str(error))
