"""`Checkpointer`: saves in the background, restores anywhere, and trusts no byte unchecked."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import jax

from gshard._util.errors import CallOrderError, GShardError, warn
from gshard._util.validation import check_integer, flag, shown
from gshard.checkpoint.arrays import arrays_of, parts_of, split_like, with_parts
from gshard.checkpoint.checksums import Damage
from gshard.checkpoint.directory import Keep, as_directory, steps_in
from gshard.checkpoint.errors import SaveFailedError
from gshard.checkpoint.metadata import Description, as_metadata, packed_data_state
from gshard.checkpoint.orbax_io import read
from gshard.checkpoint.restore import checked, existing, steps_everywhere, undamaged
from gshard.checkpoint.restore import data_state as read_data_state
from gshard.checkpoint.save import Contents, Writer
from gshard.distributed.agree import run_on_all
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.plan import Plan
from gshard.train_state import Components

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
      asynchronous: `save` returns when the arrays are copied to the host; the next `save`, `wait`,
        `restore`, `delete` or `close` waits for the rest. If not, `save` does.
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
        self._keep = Keep(keep_last, keep_every, keep_best, metric, mode)
        self._asynchronous = flag("asynchronous", asynchronous)
        if on_failure not in ("raise", "warn"):
            raise GShardError(f"on_failure={shown(on_failure)} must be 'raise' or 'warn'.")
        self._warns = on_failure == "warn"
        self._writer = Writer(self.directory, self._keep)
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
        folder = self.directory / str(self._one(step))
        found = checked(folder)
        if found and not folder.exists():
            raise GShardError(f"{folder} was deleted while it was read.")
        return found

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
          step: its number, larger than those that are there. The one that was saved last may be
            given again with the same state, and is not written again.
          state: of `shard_train_state`, at any level; for NNX the `(model, optimizer)` pair.
          data_state: where the data is, such as `loader.state_dict()`: JSON or bytes, each
            process's own.
          metadata: about the step: numbers, texts, lists and dictionaries of these; the first
            process's counts.

        Raises:
          SaveFailedError: this step, or the one before, could not be written. Steps before are as
            they were, and `save` may be called again.
          GShardError: for a state, a step or metadata that cannot be saved, or another state under
            the number that was saved last; nothing was written.
        """

        def contents() -> Contents:
            self._refuse_closed()
            number = check_integer("step", step, 0)
            plan = plan_of(state, "save(step, state)")
            arrays, leaves = arrays_of(state, plan)
            data = None if data_state is None else packed_data_state(data_state)
            table = as_metadata(metadata)
            self._keep.check(table)
            description = Description.of(number, leaves, plan, table)
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
        self.wait()

        def prepare() -> int:
            self._refuse_closed()
            return existing(self.directory, step, self.all_steps())

        self._writer.delete(run_on_all(prepare, what=lambda: f"delete(step={shown(step)})"))

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
        self.wait()

        def prepare() -> tuple[Any, Plan, int | None]:
            self._refuse_closed()
            flag("verify", verify)
            flag("cast", cast)
            asked = None if step is None else existing(self.directory, step, self.all_steps())
            return *split_like(like, "restore(like=...)"), asked

        what = f"restore(step={shown(step)}, verify={shown(verify)}, cast={shown(cast)})"
        state, plan, asked = run_on_all(prepare, what=lambda: what)
        while True:
            number, damaged = undamaged(self.directory, asked, verify)
            self._writer.damaged |= damaged
            self._writer.going_back()
            try:
                parts, found = run_on_all(lambda: self._read(number, plan, cast))  # noqa: B023
            except GShardError:
                if asked is None and number not in steps_everywhere(self.directory):
                    continue  # another job has deleted it meanwhile
                raise
            return dataclasses.replace(found, state=with_parts(parts, state, plan))

    def _read(self, step: int, plan: Plan, cast: bool) -> tuple[Components, Restored]:
        folder = self.directory / str(step)
        about = Description.read(folder)
        try:
            parts = parts_of(functools.partial(read, folder), about.leaves, plan, cast)
        except GShardError as error:
            raise GShardError(f"{folder}: {error}") from error
        data = read_data_state(folder, about.processes)
        return parts, Restored(step, None, data, dict(about.metadata))

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
        alone = jax.process_count() == 1
        told = (
            isinstance(error, SystemExit) and error.code == PREEMPTED_EXIT_CODE
        )  # all processes are
        if error is not None and not (alone or told) and self._writer.busy:
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
