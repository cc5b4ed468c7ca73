"""Writing steps into a directory: what is looked at before, begun, waited for, and deleted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from errno import ENOENT
from pathlib import Path
from typing import Any, NamedTuple

import jax

from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint import directory, orbax_io
from gshard.checkpoint import directory as folders
from gshard.checkpoint.checksums import PARTS, part_name, write_part, write_whole
from gshard.checkpoint.directory import Keep
from gshard.checkpoint.errors import SaveFailedError
from gshard.checkpoint.matching import check_same_run
from gshard.checkpoint.metadata import DATA, Description, data_state_name
from gshard.distributed.agree import FailedError, run_on_all, tell_processes

# What a skipped step changes, which keeps the number of the step: the state counts as the same.
_COUNTS = ("opt_state/guard/", "opt_state/scaler/")


class Contents(NamedTuple):
    """What a process writes of a step: its description, its arrays, its data state."""

    description: Description
    arrays: Mapping[str, jax.Array]
    data: bytes | None

    @property
    def step(self) -> int:
        """Its number."""
        return self.description.step


class Writer:
    """Writes the steps of one run. All processes make the same calls; the first owns the names.

    Attributes:
      damaged: steps that were found damaged; the next save sets them aside.
    """

    def __init__(self, directory: Path, keep: Keep):
        self.damaged: set[int] = set()
        self._directory, self._keep = directory, keep
        self._first = jax.process_index() == 0
        self._lock: int | None = None
        self._unlock: Callable[[], object] = str
        self._saving: Saving | None = None
        self._newest_own: int | None = None  # the last step that this one has written
        self._arrays: dict[str, weakref.ref[jax.Array]] = {}  # of the last step that was begun
        self._lost = 0  # saves begun that are not known to be steps

    def begin(self, describe: Callable[[], Contents]) -> None:
        """Copies the arrays to the host, and begins to write; nothing else is being written.

        Args:
          describe: gives what to write. What it raises is raised on every process.

        Raises:
          GShardError: the step may not be written; nothing was.
          SaveFailedError: it could not be begun.
        """
        contents = self._prepared(describe)
        if contents.step == self._newest_own:
            self._check_same(contents)
            return
        self._newest_own = None
        self._arrays = {path: weakref.ref(x) for path, x in contents.arrays.items()}
        folder = self._folder(contents.step)
        self._lost += 1
        begun: list[Callable[[], None]] = []
        try:
            run_on_all(lambda: begun.append(self._write(folder, contents)))
        except GShardError as error:
            for finish in begun:
                with contextlib.suppress(Exception):  # it fails too, or it does not matter
                    finish()
            run_on_all(lambda: None)  # nobody writes any more
            self._remove(folder)
            if not isinstance(error, FailedError):
                raise
            raise self._failed(contents.step, error) from error.__cause__
        self._saving = Saving(
            folder,
            jax.process_index(),
            jax.process_count(),
            begun[0],
            contents.description.leaves,
            self._delete_old,
        )
        self._saving.start()

    def _prepared(self, describe: Callable[[], Contents]) -> Contents:
        """What to write, once its folder is there; where any process cannot, there is none.

        A step that this one has just written has none either.
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
        """Refuses another state under the number of the step that was just written.

        Arrays that are not those that were written are compared with the files.
        """
        others = {path: x for path, x in contents.arrays.items() if self._is_other(path, x)}
        # Every process reads the same arrays, as in a restore.
        paths = set().union(*map(json.loads, tell_processes(json.dumps([*others])).values()))
        folder = self._directory / str(contents.step)

        def compare() -> None:
            read = {path: x for path, x in contents.arrays.items() if path in paths}
            found = orbax_io.differing(folder, read)
            if found:
                raise GShardError(
                    f"save: {folder} holds another state under this number: {some(found)} "
                    f"differ{'s' * (len(found) == 1)}. Nothing was written. Save this state under "
                    "a later number, such as the number of steps so far; or take the other one "
                    f"away first: checkpointer.delete({contents.step})."
                )

        try:
            run_on_all(compare)
        except FailedError as error:
            raise self._failed(contents.step, error) from error.__cause__

    def _is_other(self, path: str, x: jax.Array) -> bool:
        """Whether an array may have other values than the one that was written."""
        if path.startswith(_COUNTS):
            return False
        written = self._arrays.get(path)
        return written is None or written() is not x

    def wait(self) -> None:
        """Waits for the step that is being written.

        Raises:
          SaveFailedError: it is not there.
        """
        if (saving := self._saving) is None:
            return
        try:
            run_on_all(saving.part)  # Ctrl-C ends the wait, not what is waited for
            run_on_all(saving.whole)
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

    def going_back(self) -> None:
        """Another state comes, under numbers that were there before."""
        self._newest_own = None

    def delete(self, step: int) -> None:
        """Deletes a step."""

        def act() -> None:
            if self._first:
                self._own()
                folders.delete(self._directory, step)

        try:
            run_on_all(act, what=lambda: f"deletion of step {step}")
        except FailedError as error:
            raise GShardError(f"step {step} could not be deleted: {error}") from error.__cause__
        self.damaged.discard(step)
        self._newest_own = None

    def close(self) -> None:
        """Waits, and lets another one write."""
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._unlock()
            self._lock = None

    def _own(self) -> None:
        """Makes this the one that writes here, and clears what killed and failed saves left."""
        if self._lock is not None and not folders.is_locked_by(self._lock, self._directory):
            self._release()  # the directory was deleted
        if self._lock is None:
            folders.make(self._directory)
            self._lock = folders.lock(self._directory)
            # One may forget to close.
            self._unlock = weakref.finalize(self, folders.unlock, self._lock)
        folders.clean(self._directory)

    def _folder(self, step: int) -> Path:
        return folders.saving(self._directory, step, self._lost)

    def _make(self, folder: Path, contents: Contents) -> None:
        """Looks whether the step may be written, and makes its folder."""
        self._own()
        there = folders.steps_in(self._directory)
        steps = [step for step in there if step not in self.damaged]
        if steps:
            newest = self._newest(steps[-1])
            check_same_run(newest.leaves, contents.description.leaves, str(self._directory))
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
            for name in (".", orbax_io.ARRAYS, PARTS, DATA):
                (folder / name).mkdir()
            contents.description.write(folder)
        except BaseException:
            self._remove(folder)
            raise

    def _newest(self, step: int) -> Description:
        try:
            return Description.read(self._directory / str(step))
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
            path = folder / data_state_name(jax.process_index())
            folders.write_durably(path, contents.data)
        return orbax_io.write(folder, contents.arrays)

    def _delete_old(self) -> None:
        """In the thread of a save, after its commit."""
        if self._keep.all:  # and no description needs to be read
            return
        metadata: dict[int, Mapping[str, Any]] = {}
        for step in folders.steps_in(self._directory):
            # What is damaged stays, to be looked at, and does not keep the others.
            with contextlib.suppress(GShardError):
                metadata[step] = Description.read(self._directory / str(step)).metadata
        for step in self._keep.to_delete(metadata):
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


_TICK = 0.02  # seconds between looks for the parts of others
_AT_EXIT = 60.0  # seconds that the first waits for them when its program is over

_program_over = threading.Event()
_on_their_way: set[Saving] = set()


class Saving:
    """A step that is being written.

    Args:
      folder: of `directory.saving`, which exists.
      process: this one's rank.
      processes: how many write.
      finish: waits until this process's parts are on the disk.
      leaves: paths of the arrays.
      then: the first process calls it after the commit.

    Attributes:
      afterwards: what `then` raised; the step itself is there.
    """

    def __init__(
        self,
        folder: Path,
        process: int,
        processes: int,
        finish: Callable[[], None],
        leaves: Collection[str],
        then: Callable[[], None],
    ):
        self.folder, self._process, self._processes = folder, process, processes
        self._finish, self._leaves, self._then = finish, leaves, then
        self._part_over, self._given_up = threading.Event(), threading.Event()
        # Not `Thread.join`: in Python 3.11 a Ctrl-C in it lets the next one return at once.
        self._over = threading.Event()
        self._failure: Exception | None = None
        self.afterwards: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gshard-save")

    def start(self) -> None:
        """Begins; apart, so that Ctrl-C finds what has begun in the hands of who waits for it."""
        _on_their_way.add(self)
        self._thread.start()

    @property
    def step(self) -> int:
        """Its number."""
        return directory.step_of(self.folder)

    def part(self) -> None:
        """Waits for this process's part.

        Raises:
          Exception: why it could not be written.
        """
        if self._thread.ident is None:
            raise InterruptedError("it was interrupted before it began")
        self._part_over.wait()
        if self._failure is not None:
            raise self._failure

    def whole(self) -> None:
        """Waits for the commit, once every process has written its part.

        Raises:
          Exception: why there is none.
        """
        self.join()
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Another process failed: nothing is committed, and the thread ends."""
        self._given_up.set()
        if self._thread.ident is not None:
            self.join()

    def join(self) -> None:
        """Waits until the thread is done, however it ends."""
        self._over.wait()

    def _run(self) -> None:
        try:
            self._save()
        finally:
            _on_their_way.discard(self)
            self._over.set()

    def _save(self) -> None:
        try:
            self._write_part()
            self._part_over.set()
            if self._process > 0 or not self._parts_are_there():
                return
            orbax_io.finish(self.folder)
            write_whole(self.folder, self._processes)
            directory.commit(self.folder)
        except Exception as error:  # raised where somebody waits
            self._failure = error
            self._part_over.set()
            if _program_over.is_set():  # nobody will
                print(f"gshard: step {self.step} was not saved: {error}", file=sys.stderr)
            return
        try:
            self._then()
        except Exception as error:
            self.afterwards = error

    def _write_part(self) -> None:
        self._finish()
        files = orbax_io.files_of(self.folder, self._process)
        # Without any its devices hold copies alone, which others have written.
        ranges = orbax_io.ranges_of(self.folder, self._process, self._leaves) if files else {}
        if (self.folder / data_state_name(self._process)).exists():
            files.append(data_state_name(self._process))
        write_part(self.folder, self._process, files, ranges)

    def _parts_are_there(self) -> bool:
        """Waits for all parts; False when another process has failed."""
        missing = [self.folder / part_name(rank) for rank in range(self._processes)]
        own, end = missing[self._process], None
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
    for saving in list(_on_their_way):
        saving.join()


# A program that ends waits for its last save. Python waits for all threads, but stops executors
# before, and Orbax writes with these; nothing public comes earlier.
threading._register_atexit(_wait_at_exit)  # pyright: ignore[reportAttributeAccessIssue]
