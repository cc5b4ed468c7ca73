"""`StepWriter`: prepares the saves of a run, starts them in the background, and awaits them."""

from __future__ import annotations

import contextlib
import json
import shutil
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from gshard._util.durable import make_folder, write_file
from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint import directory as folders
from gshard.checkpoint import orbax
from gshard.checkpoint.arrays import check_same_run
from gshard.checkpoint.background_save import BackgroundSave
from gshard.checkpoint.checksums import PROCESS_MANIFESTS
from gshard.checkpoint.data_state import data_state_name
from gshard.checkpoint.directory import DATA, RetentionPolicy, StepInfo
from gshard.checkpoint.directory_lock import is_locked_by, lock, unlock
from gshard.distributed.agree import FailedError, all_gather_text, run_on_all

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


class StepWriter:
    """Writes the steps of one run. All processes make the same calls; the first makes the folders.

    A restore adds the steps that it finds damaged to `damaged`; the next save sets them aside.
    """

    def __init__(self, directory: Path, retention: RetentionPolicy):
        self.damaged: set[int] = set()
        self._directory, self._retention = directory, retention
        self._first = jax.process_index() == 0
        self._lock: int | None = None
        self._unlock: Callable[[], object] = str
        self.saving: BackgroundSave | None = None  # until somebody has waited for it
        self.last_step: int | None = None  # that this object has written
        # Of the step that was begun last, to recognize it when it is saved again.
        self._metadata: Mapping[str, Any] = {}
        self._data: bytes | None = None
        self._arrays: dict[str, weakref.ref[jax.Array]] = {}
        self._uncommitted = 0  # saves that were begun and are not known to be steps

    def claim(self) -> None:
        """Locks the directory, so that another job that would write there is refused now."""

        def become_writer() -> None:
            if self._first:
                try:
                    self._become_writer()
                except OSError as error:  # no error: it may only be there to restore
                    warn(
                        f"{self._directory} cannot be written: {error.strerror or error}. "
                        "Every save will fail. Choose another directory, or pass writes=False to "
                        "only restore from this one."
                    )

        call = "Checkpointer(writes=True)"
        run_on_all(become_writer, call=call, what=lambda: call)

    def begin(self, describe: Callable[[], Contents], compare: Callable[[], None]) -> None:
        """Copies the arrays to the host and starts to write, when no other save is running.

        `describe` returns what to write. `compare` runs once all processes have something to write,
        and raises an error on all if they must not. An error of one process is raised on all: as a
        `SaveFailedError` if the save could not be started, and otherwise nothing was written.
        """
        found: list[Contents] = []
        try:
            self._prepare(describe, compare, found)
            if found[0].step == self.last_step:
                self._check_same(found[0])
            else:
                self._start(found[0])
        except FailedError as error:
            if not found:
                raise
            raise self._failed(found[0].step, error) from error.__cause__

    def _prepare(
        self,
        describe: Callable[[], Contents],
        compare: Callable[[], None],
        found: list[Contents],
    ) -> None:
        """Appends what to write, and makes its folder; none is left if any process fails.

        The step that this object has written last gets no folder either.
        """
        made: list[Path] = []

        def prepare() -> None:
            found.append(describe())
            if not (self._directory / str(self.last_step)).exists():
                self.last_step = None
            if self._first and found[0].step != self.last_step:
                made.append(self._make_folder(found[0]))

        def what() -> str:
            again = " again" if found and found[0].step == self.last_step else ""
            return f"save of step {found[0].step}{again}" if found else ""

        try:
            run_on_all(prepare, call="save", what=what)
            compare()
        except GShardError:
            for folder in made:
                self._remove(folder)
            raise

    def _start(self, contents: Contents) -> None:
        """Copies the arrays to the host, and starts the thread that writes them."""
        self.last_step = None
        self._metadata, self._data = contents.info.metadata, contents.data
        self._arrays = {path: weakref.ref(x) for path, x in contents.arrays.items()}
        folder = self._folder(contents.step)
        self._uncommitted += 1
        begun: list[Callable[[], None]] = []
        call = f"save of step {contents.step}"
        try:
            run_on_all(lambda: begun.append(self._write(folder, contents)), call=call)
        except GShardError:
            for finish in begun:
                with contextlib.suppress(Exception):  # the save has failed already
                    finish()
            run_on_all(lambda: None, call=call)  # nobody writes any more
            self._remove(folder)
            raise
        self.saving = BackgroundSave(
            folder,
            contents.step,
            jax.process_index(),
            jax.process_count(),
            begun[0],
            contents.info.arrays,
            self._delete_old,
        )
        self.saving.start()

    def _check_same(self, contents: Contents) -> None:
        """Refuses `contents` that are not the step that was just written.

        Arrays that are other objects than those that were written are compared with the files.
        After a skipped step the number is the same, and so are all arrays but the counts of skipped
        steps: then the step is not changed, nor are its data state and metadata.
        """
        read, last = contents.arrays, self._arrays
        others = [path for path, x in read.items() if path not in last or last[path]() is not x]
        everywhere = _all_of(others)  # every process reads the same arrays, as in a restore
        read = {path: x for path, x in read.items() if path in everywhere}
        folder = self._directory / str(contents.step)
        call = f"save of step {contents.step} again"
        changed = run_on_all(lambda: orbax.differing_arrays(folder, read), call=call)
        changed = _all_of(changed)
        differing = [p for p in contents.arrays if p in changed and not p.startswith(_COUNTS)]
        if differing:
            raise GShardError(
                f"save: {folder} holds another state under this number: {some(differing)} "
                f"differ{'s' * (len(differing) == 1)}. Nothing was written. Save this state under "
                "a later number, such as the number of steps so far; or delete the other one "
                f"first: checkpointer.delete({contents.step})."
            )

        def refuse() -> None:
            other = ["data_state"] if contents.data not in (None, self._data) else []
            now, then = json.dumps(contents.info.metadata), json.dumps(self._metadata)
            other += ["metadata"] if self._first and now not in ("{}", then) else []
            if other and not changed:
                raise GShardError(
                    f"save: {folder} holds this state with other {' and '.join(other)}. Nothing "
                    "was written. Pass what was passed before, or nothing; or delete the step "
                    f"first: checkpointer.delete({contents.step})."
                )

        run_on_all(refuse, call=call)

    def wait(self) -> None:
        """Waits for the step that is being written; a failure is a `SaveFailedError`."""
        if (saving := self.saving) is None:
            return
        try:
            call = f"the end of the save of step {saving.step}"
            run_on_all(saving.wait_for_files, call=call)  # Ctrl-C ends the wait, not the save
            run_on_all(saving.wait_for_commit, call=call)
        except GShardError as error:
            self.saving = None
            saving.give_up()
            self._remove(saving.folder)
            raise self._failed(saving.step, error) from error.__cause__
        self.saving = None
        self.last_step = saving.step
        self._uncommitted -= 1
        if (error := saving.afterwards) is not None:
            warn(f"step {saving.step} is saved, but an older one could not be deleted: {error}")

    def delete(self, step: int) -> None:
        """Deletes a step."""

        def delete() -> None:
            if self._first:
                self._become_writer()
                folders.delete(self._directory, step)

        try:
            call = f"deletion of step {step}"
            run_on_all(delete, call=call, what=lambda: call)
        except FailedError as error:
            raise GShardError(f"step {step} could not be deleted: {error}") from error.__cause__
        self.damaged.discard(step)
        self.last_step = None

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
        if self._lock is not None and not is_locked_by(self._lock, self._directory):
            self._release()  # the directory was deleted
        if self._lock is None:
            make_folder(self._directory)
            self._lock = lock(self._directory)
            # The user may forget to close.
            self._unlock = weakref.finalize(self, unlock, self._lock)
        folders.remove_debris(self._directory)

    def _folder(self, step: int) -> Path:
        return folders.temporary_folder(self._directory, step, self._uncommitted)

    def _make_folder(self, contents: Contents) -> Path:
        """Checks that the step may be written, and makes its folder."""
        self._become_writer()
        there = folders.steps_in(self._directory)
        steps = [step for step in there if step not in self.damaged]
        if steps:
            try:
                newest = StepInfo.read(self._directory / str(steps[-1]))
            except GShardError as error:
                raise GShardError(
                    f"save: {error} Call restore(), which finds the newest undamaged step; the "
                    "next save then sets the damaged ones aside. Or delete it: "
                    f"checkpointer.delete({steps[-1]})."
                ) from error
            check_same_run(newest.arrays, contents.info.arrays, str(self._directory))
            if steps[-1] >= contents.step:
                raise GShardError(
                    f"save: step {contents.step} is not after the newest one, {steps[-1]}, in "
                    f"{self._directory}. Restore that one and continue from it, choose another "
                    "directory, or delete the newer steps: checkpointer.delete(step)."
                )
        if (self._directory / str(contents.step)).exists() and contents.step not in self.damaged:
            raise GShardError(
                f"save: {self._directory / str(contents.step)} exists, and gshard did not write "
                "it. Choose another directory."
            )
        size = sum(x.size * x.dtype.itemsize for x in contents.arrays.values())
        free = shutil.disk_usage(self._directory).free
        if size > free:
            raise OSError(f"the disk has {free:,} bytes free, and the step needs {size:,}")
        for step in sorted(self.damaged & set(there)):
            warn(f"the damaged step {step} is now {folders.set_aside(self._directory, step)}.")
        self.damaged.clear()
        folder = self._folder(contents.step)
        try:
            for name in (".", orbax.ARRAYS, PROCESS_MANIFESTS, DATA):
                (folder / name).mkdir()
            contents.info.write(folder)
        except BaseException:
            self._remove(folder)
            raise
        return folder

    def _write(self, folder: Path, contents: Contents) -> Callable[[], None]:
        if not folder.is_dir():
            raise GShardError(
                f"save: process {jax.process_index()} does not see {folder}, which process 0 has "
                "made. All processes need one directory, on a file system that all machines share."
            )
        if contents.data is not None:
            write_file(folder / data_state_name(jax.process_index()), contents.data)
        return orbax.write(folder, contents.arrays)

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

    def _failed(self, step: int, why: GShardError) -> SaveFailedError:
        newest = max(folders.steps_in(self._directory), default=None)
        known = "There is no step yet" if newest is None else f"The newest step is {newest}"
        return SaveFailedError(
            f"step {step} was not saved in {self._directory}: {why}. {known}.", step
        )


def _all_of(paths: Collection[str]) -> set[str]:
    """The paths of all processes."""
    texts = all_gather_text(json.dumps([*paths]), what="save")
    return set().union(*map(json.loads, texts.values()))
