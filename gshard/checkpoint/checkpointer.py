"""`Checkpointer`: saves in the background, restores onto any mesh, and verifies every byte."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import jax

from gshard._util import events
from gshard._util.activity import spending
from gshard._util.arguments import named_arguments
from gshard._util.errors import CallOrderError, GShardError, warn
from gshard._util.pytree import flatten
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, flag, shown
from gshard.checkpoint.arrays import arrays_of, refuse_waiting, state_and_plan
from gshard.checkpoint.checksums import Damage, verify_step
from gshard.checkpoint.data_state import packed_data_state
from gshard.checkpoint.local.tier import LocalTier
from gshard.checkpoint.open_store import open_store
from gshard.checkpoint.restore import Restored, Tier, restore
from gshard.checkpoint.retention import RetentionPolicy, readable_metadata
from gshard.checkpoint.rhythm import Rhythm
from gshard.checkpoint.save import Contents, SaveFailedError, StepWriter
from gshard.checkpoint.step_files import StepFiles, store_errors_explained
from gshard.checkpoint.step_info import StepInfo, as_metadata, existing_step
from gshard.checkpoint.undamaged import steps_everywhere
from gshard.distributed.agree import all_gather_text, run_on_all
from gshard.distributed.exit import PREEMPTED_EXIT_CODE, was_preempted
from gshard.distributed.traced_losses import compare_losses
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.plan import Plan
from gshard.train.late_checks import late_checks

S = TypeVar("S")


_INSTEAD = {  # of other libraries' arguments
    "directory": "Pass a folder, or an address such as gs://bucket/run.",
    "options": "Its options are arguments here, such as every= and keep_last=.",
    **dict.fromkeys(("max_to_keep", "save_total_limit"), "It is keep_last= here."),
    **dict.fromkeys(("save_interval_steps", "save_steps"), "It is every= here."),
    **dict.fromkeys(("keep_period", "keep_every_n_steps"), "It is keep_every= here."),
    "best_fn": "It is keep_best= here, with metric= and mode=.",
    "best_mode": "It is mode= here.",
}


class Checkpointer:
    """The checkpoints of one run, in one directory.

    With several processes, each creates one for the same directory, on a file system that all of
    them see or in an object store, and all make the same calls.

    Args:
      directory: the path of the directory, which the first save makes, or an address such as
        `gs://bucket/run` or `s3://bucket/run`.
      every: `save` writes the steps whose number is a multiple of this, and ignores the others, so
        that it may be called after each step. None: all of them.
      local: a folder that each machine has of its own, in memory (`/dev/shm/...`) or on its disk.
        It keeps the newest step between those of the directory.
      local_every: `save` writes the other steps whose number is a multiple of this into `local`.
      keep_last: how many of the newest steps to keep.
      keep_every: also keep the steps whose number is a multiple of this.
      keep_best: also keep this many steps with the best `metric`. If none of these three is given,
        all steps are kept.
      metric: the key of `metadata` that `keep_best` and `best_step` compare.
      mode: whether the lowest (`"min"`) or the highest (`"max"`) metric is best. A metric whose
        name contains "loss" is best where it is lowest; for any other metric, `keep_best`
        and `best_step` need `mode`.
      asynchronous: True lets `save` return when the arrays are copied to the host; the next `save`,
        `wait`, `restore`, `delete` or `close` waits until they are written. False lets `save` wait.
      writes: True locks the directory now, so that a second job is refused before it trains; False
        locks it at the first save, so that others may write until then. None: True if `keep_last=`,
        `keep_every=` or `keep_best=` is given. Reading (`restore`, `verify`, `metadata`) needs no
        lock.
      on_failure: `"raise"` a `SaveFailedError` when a step could not be written, or `"warn"` and
        continue. A local step that could not be written is always a warning.

    Raises:
      CallOrderError: another process writes into the directory, or into the local folder.
      GShardError: an argument is invalid.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> step = gshard.make_train_step(loss_fn, plan)
      >>> with gshard.Checkpointer("checkpoints", keep_last=3) as checkpointer:
      ...     done = checkpointer.latest_step() or 0
      ...     if done:
      ...         state = checkpointer.restore(like=state).state
      ...     for number in range(done + 1, done + 3):
      ...         state, metrics = step(state, batch)
      ...         checkpointer.save(number, state)
      >>> checkpointer.all_steps()
      [1, 2]
    """

    @named_arguments(_INSTEAD)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        local: str | os.PathLike[str] | None = None,
        local_every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: Literal["min", "max"] | None = None,
        asynchronous: bool = True,
        writes: bool | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
    ):
        self._store = open_store(directory)
        self._retention = RetentionPolicy(keep_last, keep_every, keep_best, metric, mode)
        self._asynchronous = flag("asynchronous", asynchronous)
        if on_failure not in ("raise", "warn"):
            raise GShardError(f"on_failure={shown(on_failure)} must be 'raise' or 'warn'.")
        self._warns = on_failure == "warn"
        self._rhythm = Rhythm(every, local, local_every)
        saved, kept = self._rhythm.every, self._retention.every
        if kept and kept % saved and saved % kept:
            warn(
                f"keep_every={kept} keeps only multiples of {math.lcm(saved, kept)}: "
                f"every={saved} does not save the others. Make keep_every= a multiple of every=."
            )
        self._writer = StepWriter(self._store, self._retention)
        self._local = None if local is None else LocalTier(local, self._store, str(self._rhythm))
        self._elsewhere: str | None = None  # where the last state is that `save` was given
        self._last: tuple[StepWriter | None, Any] = None, None  # who was to write it, and its step
        self._closed, self._writes, self._process = False, writes, os.getpid()
        # One thread at a time: a save that begins removes what it takes for debris.
        self._in_use = threading.RLock()
        if not self._retention.keeps_all if writes is None else flag("writes", writes):
            for writer in self._writers():
                writer.claim()

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r}{', closed' if self._closed else ''})"

    @property
    def directory(self) -> Path | str:
        """The absolute path of the directory, or the address of an object store."""
        return self._store.directory

    def all_steps(self) -> list[int]:
        """The complete steps, ascending. A step that is being saved is not one of them yet.

        Each process lists the directory by itself: on a network file system, one may see a new step
        seconds after another.
        """
        with store_errors_explained():
            return self._store.steps()

    def latest_step(self) -> int | None:
        """The newest complete step, of the directory or the local folders, or None.

        It does not wait for a save, and lists the directory as `all_steps` does. Of the local
        folders it knows what was there when this `Checkpointer` was made, and what it saved since.
        """
        local = () if self._local is None else self._local.steps
        return max((*self.all_steps(), *local), default=None)

    def best_step(self) -> int | None:
        """The step in the directory with the best `metric`; None if it has no steps.

        Of equal ones it is the newest. Steps that are only in `local` do not count, nor does one
        that is being saved: call `wait` first.

        Raises:
          GShardError: no step has a finite metric, or `mode` is missing.
        """
        with store_errors_explained():
            return self._retention.best_of(readable_metadata(self._store), str(self._store))

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata that `save` was given for a step, by default the newest."""
        with store_errors_explained():
            return dict(StepInfo.read(self._step(step)).metadata)

    def verify(self, step: int | None = None) -> list[Damage]:
        """Reads every byte of a step, by default the newest, and compares the checksums.

        Returns:
          The files that differ from what was written; empty for an undamaged step.
        """
        files = self._step(step)
        gone = f"{files} was deleted while it was read."
        try:
            with store_errors_explained():
                found = verify_step(files)
        except GShardError as error:  # NFS says of a deleted file that its handle is stale
            if int(files.name) not in self.all_steps():
                raise GShardError(gone) from error
            raise
        if found and int(files.name) not in self.all_steps():
            raise GShardError(gone)
        return found

    @short_traceback
    def save(
        self,
        step: int,
        state: Any,
        *,
        data_state: Any = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Writes a train state as a step, if its number is one to be saved.

        The state is copied to the host before this returns, so it may be trained on and donated.
        Each process copies and writes its local shards; nothing is gathered.

        Args:
          step: the step's number, larger than those of existing steps. The step that was saved or
            restored last may be saved again with the same state; it is not written again.
          state: what `shard_train_state` or a step returned, at any level; for NNX the
            `(model, optimizer)` pair.
          data_state: the position in the data, such as `loader.state_dict()`: JSON values or bytes,
            of each process.
          metadata: facts about the step: numbers, strings, lists and dictionaries of these. The
            first process's metadata is written.
          force: True writes the step into the directory whatever its number, such as the last one.
            Once `gshard.distributed.preempted` has told the job to stop, every save does.

        Raises:
          SaveFailedError: this step, or the one before, could not be written. Earlier steps are
            unchanged, and `save` may be called again.
          GShardError: the state, the step or the metadata cannot be saved, or the step that was
            saved last has another state, data state or metadata; nothing was written.
        """

        def contents() -> Contents:
            self._refuse_closed()
            number = check_integer("step", step, 0)
            plan = plan_of(state, "save(step, state)")
            late_checks(plan).look(late=0)
            arrays, infos = arrays_of(state, plan)
            data = None if data_state is None else packed_data_state(data_state)
            table = as_metadata(metadata)
            if writer is self._writer:  # local steps are none of the best
                self._retention.check(table)
            return Contents(StepInfo.of(number, infos, plan, table), arrays, data, plan)

        self._refuse_fork()
        writer, elsewhere = self._writer_of(step, flag("force", force))
        self._last = writer, step
        if writer is None:
            self._refuse_closed()  # a writer says so on all processes
            self._elsewhere = elsewhere
            return

        def begin() -> None:
            writer.begin(contents, lambda: compare_losses(plan_of(state, "save")))
            self._elsewhere = elsewhere
            if writer is self._writer and self._local is not None:
                number, saving = check_integer("step", step, 0), self._local.saving
                if saving is not None and saving.draft.step > number:  # it is given up too
                    self._run(self._local, self._local.wait)
                self._local.abandon(number)
            if not self._asynchronous:
                self._wait_for(writer)

        with self._call():
            self._await(writer)
            self._run(writer, begin)

    def _writer_of(self, step: Any, force: bool) -> tuple[StepWriter | None, str | None]:
        """Who writes a step of this number, and where it is if not in the directory."""
        try:
            number = check_integer("step", step, 0)
        except GShardError:  # raised by the writer, on all processes
            return self._writer, None
        missed = self._rhythm.missed(number)
        saving = self._writer.saving
        newest = self._writer.last_step if saving is None else saving.draft.step
        if force or self._rhythm.is_of_directory(number) or was_preempted() or number == newest:
            return self._writer, None
        if missed is not None:
            warn(
                f"save was called for earlier steps and for step {number}, but not for step "
                f"{missed}, so {self._store} does not get that step (every={self._rhythm.every}). "
                "Call save after each step: it ignores those that are not to be saved."
            )
        if self._local is None or not self._rhythm.is_local(number):
            return None, f"step, {number}, was not saved"
        return self._local, f"step, {number}, is only in {self._local.store}"

    def _await(self, writer: StepWriter) -> None:
        """Waits for the writer's last save; a save of the directory that is done is looked at."""
        if writer is not self._writer and self._writer.saving is not None:
            told = all_gather_text(str(self._writer.saving.is_done()), what="save")
            if {*told.values()} == {"True"}:
                self._run(self._writer, lambda: self._wait_for(self._writer))
        self._run(writer, lambda: self._wait_for(writer))

    def _wait_for(self, writer: StepWriter) -> None:
        writer.wait()
        if writer is self._writer and self._local is not None and writer.last_step is not None:
            self._local.directory_has(writer.last_step)

    @short_traceback
    def wait(self) -> None:
        """Waits until the last save is complete and on the disk.

        Raises:
          SaveFailedError: the step could not be written; with `on_failure="warn"` this is a
            warning.
        """
        with self._call():
            for writer in self._writers():
                self._await(writer)

    def _writers(self) -> list[StepWriter]:
        """The first is preferred where both have a step."""
        return [self._writer] if self._local is None else [self._writer, self._local]

    def delete(self, step: int) -> None:
        """Deletes a step: at once for readers, then file by file.

        Raises:
          GShardError: there is no such step, or it cannot be deleted.
        """

        def prepare() -> int:
            self._refuse_closed()
            return existing_step(self._store, step, self.all_steps())

        with self._call():
            self.wait()
            call = f"delete(step={shown(step)})"
            self._writer.delete(run_on_all(prepare, call=call, what=lambda: call))
            if self._local is not None:
                self._local.directory_lost(self._newest_undamaged())

    @overload
    def restore(
        self, step: int | None = None, *, like: Plan, verify: bool = True, cast: bool = False
    ) -> Restored[Any]: ...

    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        like: tuple[S, Plan],
        verify: bool = True,
        cast: bool = False,
    ) -> Restored[S]: ...

    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        like: S,
        only: str | Sequence[str] | None = None,
        verify: bool = True,
        cast: bool = False,
    ) -> Restored[S]: ...

    @short_traceback
    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        only: str | Sequence[str] | None = None,
        verify: bool = True,
        cast: bool = False,
    ) -> Restored[Any]:
        """Reads a step onto any mesh, at any level, with any number of processes.

        Each process reads what its devices need.

        Args:
          step: the number of the step; None for the newest that is undamaged. A warning names the
            damaged ones, which the next save sets aside.
          like: what `shard_train_state` returned: the state; or, without arrays, its plan or
            `(abstract state, plan)`. An NNX `(model, optimizer)` is changed in place, and returned.
          only: a regular expression, or several: restores only the weights whose path contains a
            match, `"."` for all. Other weights, the optimizer's state, the step and typed random
            keys keep their values in `like`, and the checkpoint's optimizer does not matter.
          verify: False skips the comparison of the files with their checksums.
          cast: True converts arrays of another floating dtype, and of another integer dtype.

        Returns:
          The restored state, of the type of the given one, with its data state and metadata.

        Raises:
          DamagedCheckpointError: the requested step is damaged, or all are.
          GShardError: there is no such step, or it is of another model; each array that differs is
            named by its path.
        """

        def prepare() -> tuple[Any, Plan, int | None]:
            self._refuse_closed()
            flag("verify", verify)
            flag("cast", cast)
            local = set() if self._local is None else self._local.steps
            asked = None
            if step is not None:
                asked = existing_step(self._store, step, sorted({*self.all_steps(), *local}))
            state, plan = state_and_plan(like, "restore(like=...)")
            refuse_waiting(state)
            return state, plan, asked

        part = "" if only is None else f"only={shown(only)}, "
        what = f"restore(step={shown(step)}, {part}verify={shown(verify)}, cast={shown(cast)})"
        with self._call():
            self.wait()
            began = time.monotonic()
            state, plan, asked = run_on_all(prepare, call=what, what=lambda: what)
            with contextlib.ExitStack() as stack:
                readers = [stack.enter_context(x.reader(verify)) for x in self._writers()]
                tiers = [*map(Tier, self._writers(), readers)]
                found = restore(tiers, asked, state, plan, cast, only)
            if only is not None:  # the state is not the one that was saved
                return found
            if self._local is not None:
                if asked is None or self._writes is False:
                    self._local.forget(lambda own: own > found.step)
                else:
                    self._local.abandon(found.step)
            newest = self._newest_undamaged()
            if self._local is not None:
                self._local.after = newest
            if self._local is not None and found.source == str(self._local.store):
                self._local.has_restored(found.step, found.metadata, found.data_state)
                self._local.count_skipped(plan.kind.split(found.state).opt_state.guard.skipped)
            else:
                self._elsewhere = None  # training goes on from what the directory has
                if found.step == newest:
                    self._writer.has_restored(found.step, found.metadata, found.data_state)
                    paths, arrays, _ = flatten(plan.kind.split(found.state))
                    pairs = zip(paths, arrays, strict=True)
                    self._writer.remember({p: x for p, x in pairs if isinstance(x, jax.Array)})
            self._rhythm.start_again()
            late_checks(plan).forget()
            events.restored(found.step, time.monotonic() - began)
            return found

    def _newest_undamaged(self) -> int:
        """The newest step of the directory that is not known to be damaged, or -1."""
        return max({*steps_everywhere(self._store)} - self._writer.damaged, default=-1)

    @short_traceback
    def close(self) -> None:
        """Waits for the last save, and lets another `Checkpointer` write into the directory."""
        if self._process != os.getpid():  # as where a fork leaves a `with`
            return
        with self._call():
            self._closed, failed = True, None
            with contextlib.ExitStack() as stores:
                for writer in self._writers():
                    stores.callback(writer.store.close)
                for writer in self._writers():
                    try:
                        self._await(writer)
                    except SaveFailedError as error:
                        failed = failed or error
            elsewhere, self._elsewhere = self._elsewhere, None
            if failed is not None:
                raise failed
            if elsewhere is not None:
                warn(
                    f"the last {elsewhere}, so {self._store} has an older state. Save the "
                    "last one with save(step, state, force=True)."
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # A preemption reaches all processes, other errors may happen in one.
        preempted = isinstance(error, SystemExit) and error.code == PREEMPTED_EXIT_CODE
        everywhere = error is None or preempted or jax.process_count() == 1
        if error is not None:
            self._elsewhere = None  # what is missing at an error needs no word
        if everywhere or all(writer.saving is None for writer in self._writers()):
            self.close()
        # Otherwise other processes may never call this; the thread ends by itself.

    def _step(self, step: int | None) -> StepFiles:
        """The files of a step, by default the newest."""
        if step is None and (step := max(self.all_steps(), default=None)) is None:
            raise GShardError(
                f"{self._store} holds no checkpoint. If this may be the first run, check that "
                "latest_step() is not None first."
            )
        return self._store.step(existing_step(self._store, step, self.all_steps()))

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Lets one thread in at a time, and allows the transfers that the call needs."""
        self._refuse_fork()
        with self._in_use, spending("checkpoint"), jax.transfer_guard("allow"):
            yield

    def _refuse_fork(self) -> None:
        if self._process != os.getpid():  # a fork has neither the threads nor the locks
            raise CallOrderError(
                "this process is a fork of the one that made this Checkpointer, and does not have "
                "its threads. Call it in that process."
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CallOrderError("this Checkpointer is closed. Make another one.")
        if not threading.main_thread().is_alive():
            raise CallOrderError(
                "Python is ending (this is an atexit function, or a thread that outlives the main "
                "one), so a save can no longer start a thread. Save before the script ends."
            )

    def _run(self, writer: StepWriter, action: Callable[[], None]) -> None:
        """Runs an action; a failed save is an error or a warning, as the user chose."""
        try:
            action()
        except SaveFailedError as error:
            if not self._warns and writer is self._writer:
                raise
            if writer is not self._writer and self._last == (writer, error.step):
                self._elsewhere = f"step, {error.step}, was not saved"
            warn(str(error))
