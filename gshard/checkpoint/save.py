"""Writing steps: `StepWriter` prepares, starts, awaits and deletes; `BackgroundSave` is the thread.

Each process writes its shards and lists its files. When all have done so, the first process writes
the combined manifest and renames the folder to the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any, NamedTuple

import jax

from gshard._util.durable import make_folder, write_file
from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint import directory as folders
from gshard.checkpoint import orbax_io
from gshard.checkpoint.arrays import check_same_run
from gshard.checkpoint.checksums import (
    PROCESS_MANIFESTS,
    process_manifest,
    write_combined_manifest,
    write_process_manifest,
)
from gshard.checkpoint.directory import RetentionPolicy
from gshard.checkpoint.metadata import DATA, StepInfo, data_state_name
from gshard.distributed.agree import FailedError, run_on_all, tell_processes

# A skipped step changes these arrays but not the step's number.
_COUNTS = ("opt_state/guard/", "opt_state/scaler/")


class SaveFailedError(GShardError, RuntimeError):
    """A step could not be written; the steps before it are unchanged.

    Attributes:
      step: the number of the step that is missing.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Contents(NamedTuple):
    """What a process writes of a step: its description, its arrays, its data state."""

    info: StepInfo
    arrays: Mapping[str, jax.Array]
    data: bytes | None

    @property
    def step(self) -> int:
        """The step's number."""
        return self.info.step


class LastStep(NamedTuple):
    """The step that was begun last, to recognize it when it is saved again."""

    metadata: Mapping[str, Any]
    data: bytes | None
    arrays: Mapping[str, weakref.ref[jax.Array]]


class StepWriter:
    """Writes the steps of one run. All processes make the same calls; the first makes the folders.

    Attributes:
      damaged: steps that were found damaged; the next save sets them aside.
    """

    def __init__(self, directory: Path, retention: RetentionPolicy):
        self.damaged: set[int] = set()
        self._directory, self._retention = directory, retention
        self._first = jax.process_index() == 0
        self._lock: int | None = None
        self._unlock: Callable[[], object] = str
        self._saving: BackgroundSave | None = None
        self._newest_own: int | None = None  # the last step that this object has written
        self._last = LastStep({}, None, {})
        self._lost = 0  # saves that were begun and are not known to be steps

    def begin(self, describe: Callable[[], Contents]) -> None:
        """Copies the arrays to the host and starts to write, when no other save is running.

        Args:
          describe: returns what to write. An error of one process is raised on all.

        Raises:
          GShardError: the step must not be written; nothing was.
          SaveFailedError: the save could not be started.
        """
        contents = self._prepare(describe)
        if contents.step == self._newest_own:
            with self._as_save_failed(contents.step):
                self._check_same(contents)
            return
        self._newest_own = None
        arrays = {path: weakref.ref(x) for path, x in contents.arrays.items()}
        self._last = LastStep(contents.info.metadata, contents.data, arrays)
        folder = self._folder(contents.step)
        self._lost += 1
        begun: list[Callable[[], None]] = []
        with self._as_save_failed(contents.step):
            try:
                run_on_all(lambda: begun.append(self._write(folder, contents)))
            except GShardError:
                for finish in begun:
                    with contextlib.suppress(Exception):  # the save has failed already
                        finish()
                run_on_all(lambda: None)  # nobody writes any more
                self._remove(folder)
                raise
        self._saving = BackgroundSave(
            folder,
            jax.process_index(),
            jax.process_count(),
            begun[0],
            contents.info.arrays,
            self._delete_old,
        )
        self._saving.start()

    def _prepare(self, describe: Callable[[], Contents]) -> Contents:
        """What to write, after its folder was made; none is made if any process fails.

        The step that this object has written last gets no folder either.
        """
        found: list[Contents] = []
        made: list[Path] = []

        def prepare() -> None:
            found.append(describe())
            if not (self._directory / str(self._newest_own)).exists():
                self._newest_own = None
            if self._first and found[0].step != self._newest_own:
                self._make(self._folder(found[0].step), found[0])
                made.append(self._folder(found[0].step))

        def what() -> str:
            again = " again" if found and found[0].step == self._newest_own else ""
            return f"save of step {found[0].step}{again}" if found else ""

        try:
            run_on_all(prepare, what=what)
        except GShardError as error:
            for folder in made:
                self._remove(folder)
            if not (isinstance(error, FailedError) and found):
                raise
            raise self._failed(found[0].step, error) from error.__cause__
        return found[0]

    def _check_same(self, contents: Contents) -> None:
        """Raises a `GShardError` unless `contents` is the step that was just written.

        Arrays that are other objects than those that were written are compared with the files.
        After a skipped step the number is the same, and so are all arrays but the counts of skipped
        steps: then the step stays as it is, with its data state and metadata.
        """
        last, read = self._last, contents.arrays
        # Every process reads the same arrays, as in a restore.
        others = _all_of(
            [p for p, x in read.items() if p not in last.arrays or last.arrays[p]() is not x]
        )
        read = {path: x for path, x in read.items() if path in others}
        folder = self._directory / str(contents.step)
        changed = _all_of(run_on_all(lambda: orbax_io.differing_arrays(folder, read)))
        differing = [
            path for path in contents.arrays if path in changed and not path.startswith(_COUNTS)
        ]
        if differing:
            raise GShardError(
                f"save: {folder} holds another state under this number: {some(differing)} "
                f"differ{'s' * (len(differing) == 1)}. Nothing was written. Save this state under "
                "a later number, such as the number of steps so far; or delete the other one "
                f"first: checkpointer.delete({contents.step})."
            )

        def refuse() -> None:
            other = ["data_state"] if contents.data not in (None, last.data) else []
            now, then = json.dumps(contents.info.metadata), json.dumps(last.metadata)
            other += ["metadata"] if self._first and now not in ("{}", then) else []
            if other and not changed:
                raise GShardError(
                    f"save: {folder} holds this state with other {' and '.join(other)}. Nothing "
                    "was written. Pass what was passed before, or nothing; or delete the step "
                    f"first: checkpointer.delete({contents.step})."
                )

        run_on_all(refuse)

    def wait(self) -> None:
        """Waits for the step that is being written.

        Raises:
          SaveFailedError: it could not be written.
        """
        if (saving := self._saving) is None:
            return
        try:
            run_on_all(saving.wait_for_files)  # Ctrl-C ends the wait, but not the save
            run_on_all(saving.wait_for_commit)
        except GShardError as error:
            self._saving = None
            saving.give_up()
            self._remove(saving.folder)
            raise self._failed(saving.step, error) from error.__cause__
        self._saving = None
        self._newest_own = saving.step
        self._lost -= 1
        if (error := saving.afterwards) is not None:
            warn(f"step {saving.step} is saved, but an older one could not be deleted: {error}")

    @property
    def busy(self) -> bool:
        """Whether a step is being written that nobody has waited for."""
        return self._saving is not None

    def forget_last_step(self) -> None:
        """After a restore, the numbers of existing steps may be reached with other states."""
        self._newest_own = None

    def delete(self, step: int) -> None:
        """Deletes a step."""

        def delete() -> None:
            if self._first:
                self._become_writer()
                folders.delete(self._directory, step)

        try:
            run_on_all(delete, what=lambda: f"deletion of step {step}")
        except FailedError as error:
            raise GShardError(f"step {step} could not be deleted: {error}") from error.__cause__
        self.damaged.discard(step)
        self._newest_own = None

    def close(self) -> None:
        """Waits, and lets another writer write."""
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._unlock()
            self._lock = None

    def _become_writer(self) -> None:
        """Locks the directory, and removes what killed and failed saves left."""
        if self._lock is not None and not folders.is_locked_by(self._lock, self._directory):
            self._release()  # the directory was deleted
        if self._lock is None:
            make_folder(self._directory)
            self._lock = folders.lock(self._directory)
            # The user may forget to close.
            self._unlock = weakref.finalize(self, folders.unlock, self._lock)
        folders.remove_debris(self._directory)

    def _folder(self, step: int) -> Path:
        return folders.temporary_folder(self._directory, step, self._lost)

    def _make(self, folder: Path, contents: Contents) -> None:
        """Checks that the step may be written, and makes its folder."""
        self._become_writer()
        there = folders.steps_in(self._directory)
        steps = [step for step in there if step not in self.damaged]
        if steps:
            newest = self._newest(steps[-1])
            check_same_run(newest.arrays, contents.info.arrays, str(self._directory))
        if steps and steps[-1] >= contents.step:
            raise GShardError(
                f"save: step {contents.step} is not after the newest one, {steps[-1]}, in "
                f"{self._directory}. Restore that one and go on from it, or choose another "
                "directory, or take newer steps away: checkpointer.delete(step)."
            )
        if (self._directory / str(contents.step)).exists() and contents.step not in self.damaged:
            raise GShardError(
                f"save: {self._directory / str(contents.step)} is in the way, which gshard has not "
                "written. Choose another directory."
            )
        size = sum(x.size * x.dtype.itemsize for x in contents.arrays.values())
        free = shutil.disk_usage(self._directory).free
        if size > free:
            raise OSError(f"the disk has {free:,} bytes free, and the step needs {size:,}")
        for step in sorted(self.damaged & set(there)):
            warn(f"the damaged step {step} is now {folders.set_aside(self._directory, step)}.")
        self.damaged.clear()
        try:
            for name in (".", orbax_io.ARRAYS, PROCESS_MANIFESTS, DATA):
                (folder / name).mkdir()
            contents.info.write(folder)
        except BaseException:
            self._remove(folder)
            raise

    def _newest(self, step: int) -> StepInfo:
        try:
            return StepInfo.read(self._directory / str(step))
        except GShardError as error:
            raise GShardError(
                f"save: {error} Call restore(), which finds the newest undamaged step: then a save "
                f"sets the damaged ones aside. Or take it away: checkpointer.delete({step})."
            ) from error

    def _write(self, folder: Path, contents: Contents) -> Callable[[], None]:
        if not folder.is_dir():
            raise GShardError(
                f"save: process {jax.process_index()} does not see {folder}, which process 0 has "
                "made. All processes need one directory, on a file system that all machines share."
            )
        if contents.data is not None:
            write_file(folder / data_state_name(jax.process_index()), contents.data)
        return orbax_io.write(folder, contents.arrays)

    def _delete_old(self) -> None:
        """Deletes the steps that the policy does not keep; called in the thread of a save."""
        if self._retention.keeps_all:
            return
        metadata: dict[int, Mapping[str, Any]] = {}
        for step in folders.steps_in(self._directory):
            # A damaged step stays, to be examined, and the others are deleted nevertheless.
            with contextlib.suppress(GShardError):
                metadata[step] = StepInfo.read(self._directory / str(step)).metadata
        for step in self._retention.to_delete(metadata):
            folders.delete(self._directory, step)

    def _remove(self, folder: Path) -> None:
        if self._first:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _as_save_failed(self, step: int) -> Iterator[None]:
        """Turns a failure that is not a mistake in the arguments into a `SaveFailedError`."""
        try:
            yield
        except FailedError as error:
            raise self._failed(step, error) from error.__cause__

    def _failed(self, step: int, why: GShardError) -> SaveFailedError:
        newest = max(folders.steps_in(self._directory), default=None)
        known = "There is no step yet" if newest is None else f"The newest step is {newest}"
        return SaveFailedError(
            f"step {step} was not saved in {self._directory}: {why}. {known}.", step
        )


def _all_of(paths: Collection[str]) -> set[str]:
    """The paths of all processes."""
    return set().union(*map(json.loads, tell_processes(json.dumps([*paths])).values()))


_TICK = 0.02  # seconds between looks for the manifests of other processes
_AT_EXIT = 60.0  # seconds that the first process waits for them when its program has ended

_program_over = threading.Event()
_running: set[BackgroundSave] = set()


@dataclass(eq=False)
class BackgroundSave:
    """The thread that writes a step.

    Attributes:
      folder: the temporary folder, which exists.
      process: the rank of this process.
      processes: how many processes write.
      finish: waits until this process's shards are written.
      arrays: the paths of the arrays.
      then: the first process calls it after the commit.
      afterwards: the error that `then` raised; the step itself is there.
    """

    folder: Path
    process: int
    processes: int
    finish: Callable[[], None]
    arrays: Collection[str]
    then: Callable[[], None]
    afterwards: Exception | None = None

    def __post_init__(self) -> None:
        self._files_written, self._given_up = threading.Event(), threading.Event()
        # Not `Thread.join`: in Python 3.11 a Ctrl-C in it lets the next one return at once.
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gshard-save")

    def start(self) -> None:
        """Starts the thread; not in `__init__`, so that Ctrl-C cannot lose a started one."""
        _running.add(self)
        self._thread.start()

    @property
    def step(self) -> int:
        """The step's number."""
        return folders.step_of(self.folder)

    def wait_for_files(self) -> None:
        """Waits until this process has written its files, or raises why it could not."""
        if self._thread.ident is None:
            raise InterruptedError("it was interrupted before it began")
        self._files_written.wait()
        if self._failure is not None:
            raise self._failure

    def wait_for_commit(self) -> None:
        """Waits for the commit, after every process has written its files, or raises the error."""
        self.join()
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Ends the thread without a commit, because another process failed."""
        self._given_up.set()
        if self._thread.ident is not None:
            self.join()

    def join(self) -> None:
        """Waits until the thread ends, successful or not."""
        self._over.wait()

    def _run(self) -> None:
        try:
            self._save()
        finally:
            _running.discard(self)
            self._over.set()

    def _save(self) -> None:
        try:
            self._write_files()
            self._files_written.set()
            if self.process > 0 or not self._all_files_written():
                return
            orbax_io.finish(self.folder)
            write_combined_manifest(self.folder, self.processes)
            folders.commit(self.folder)
        except Exception as error:  # raised where somebody waits
            self._failure = error
            self._files_written.set()
            if _program_over.is_set():  # nobody will wait
                print(f"gshard: step {self.step} was not saved: {error}", file=sys.stderr)
            return
        try:
            self.then()
        except Exception as error:
            self.afterwards = error

    def _write_files(self) -> None:
        self.finish()
        files = orbax_io.files_of(self.folder, self.process)
        # A process that has only copies of what others write has no files.
        ranges = orbax_io.ranges_of(self.folder, self.process, self.arrays) if files else {}
        if (self.folder / data_state_name(self.process)).exists():
            files.append(data_state_name(self.process))
        write_process_manifest(self.folder, self.process, files, ranges)

    def _all_files_written(self) -> bool:
        """Waits for the manifests of all processes; False if another process failed."""
        missing = [self.folder / process_manifest(rank) for rank in range(self.processes)]
        own, end = missing[self.process], None
        while missing := [path for path in missing if not path.exists()]:
            if self._given_up.wait(_TICK):
                break
            if not own.exists():  # somebody has deleted the folder
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(own))
            if end is None and _program_over.is_set():
                end = time.monotonic() + _AT_EXIT
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{missing[0]} was not written by its process")
        return not self._given_up.is_set()


def _wait_at_exit() -> None:
    _program_over.set()
    for saving in list(_running):
        saving.join()


# A program that ends waits for its last save. Python waits for all threads, but stops executors
# before, and Orbax writes with these; nothing public comes earlier.
threading._register_atexit(_wait_at_exit)  # pyright: ignore[reportAttributeAccessIssue]
