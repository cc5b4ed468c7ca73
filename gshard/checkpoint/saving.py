"""One save on its way, in a thread: each process writes its part, the first commits the whole.

Processes meet in files alone here: a collective in a thread has no order with those of the step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from errno import ENOENT
from pathlib import Path

from gshard.checkpoint import directory, orbax_io
from gshard.checkpoint.checksums import part_name, write_part, write_whole
from gshard.checkpoint.metadata import data_state_name

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
