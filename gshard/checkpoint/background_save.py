"""`BackgroundSave`: the thread in which a process writes its files of a step.

Each process writes its files. When all have done so, the first one commits the draft.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path

from gshard._util.activity import collecting, doing, saved
from gshard.checkpoint.manifest import PROCESS_MANIFESTS, process_manifest
from gshard.checkpoint.store import Draft
from gshard.distributed import unfinished
from gshard.distributed.initialize import watchdogs

_POLL, _LONGEST_POLL = 0.02, 2.0  # seconds between looks for the manifests of other processes
_REST = 200  # times as long as such a look takes, which the thread leaves the training loop
# Seconds for the others' files once this program has ended, unless theirs are known to run.
_EXIT_TIMEOUT = 60.0
_program_over = threading.Event()
_running: set[BackgroundSave] = set()
_failed: dict[threading.Event, str] = {}  # errors of saves that no caller has received
_uncommitted: Draft | None = None  # what the first process may still have to commit


@dataclass(eq=False)
class BackgroundSave:
    """The thread that writes a step."""

    draft: Draft  # which this process has joined
    process: int  # the rank of this process among those that write the step
    processes: int  # how many write
    finish: Callable[[], object]  # waits until this process's files are where the first finds them
    then: Callable[[], None]  # the first process calls it after the commit
    afterwards: Exception | None = None  # raised by `then`; the step itself is there

    def __post_init__(self) -> None:
        self._given_up = threading.Event()
        # Not `Thread.join`: in Python 3.11 a Ctrl-C in it lets the next one return at once.
        self._files: Future[None] = Future()
        self._commit: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="gshard-save")

    def start(self) -> None:
        """Starts the thread; not in `__init__`, so that Ctrl-C cannot lose a started one.

        If the system starts no more threads, the save has failed: `wait_for_files` raises it.
        """
        _running.add(self)
        try:
            self._thread.start()
        except Exception as error:
            self.finish = bool  # no manifest is written, so that nobody commits the step
            self._has_failed(error)
        except BaseException:
            if self._thread.ident is None:
                _running.discard(self)
            raise

    def wait_for_files(self) -> None:
        """Waits until this process has written its files, or raises why it could not."""
        if self._thread.ident is None and not self._files.done():
            raise InterruptedError("it was interrupted before it began")
        self._files.result()

    def wait_for_commit(self) -> None:
        """Waits for the commit, after every process has written its files, or raises the error."""
        self._commit.result()

    def give_up(self) -> None:
        """Ends the thread without a commit, because this process failed or another one."""
        global _uncommitted
        self._given_up.set()
        if self._thread.ident is not None:
            self.join()
        if _uncommitted is self.draft:
            _uncommitted = None  # nobody commits it any more
        _failed.pop(self._given_up, None)

    def is_done(self) -> bool:
        """Whether this process has nothing more to do for the step."""
        return self._commit.done()

    def join(self) -> None:
        """Waits until the thread ends, successful or not."""
        self._commit.exception()

    def _run(self) -> None:
        what = f"the save of step {self.draft.step}"
        with doing(what), unfinished.finished_first(what, step=self.draft.step) as event:
            self._write_and_commit()
            if self._given_up.is_set():
                event["error"] = "another process failed"
            elif (error := self._commit.exception()) is not None:
                event["error"] = str(error)

    def _write_and_commit(self) -> None:
        global _uncommitted
        try:
            self.finish()
            self._files.set_result(None)
            if self.process != 0:
                _uncommitted = self.draft
            elif self._all_files_written():
                self.draft.combine(self.processes)
                saved(self.draft.commit())
                try:
                    self.then()
                except Exception as error:
                    self.afterwards = error
            self._commit.set_result(None)
        except Exception as error:  # raised where somebody waits
            self._has_failed(error)
        finally:
            _running.discard(self)
            self.finish = bool  # it refers to the copies of the arrays

    def _has_failed(self, error: Exception) -> None:
        _running.discard(self)
        if not self._files.done():
            self._files.set_exception(error)
        # `self` as the key would keep the directory locked.
        _failed[self._given_up] = f"step {self.draft.step} was not saved: {error}"
        self._commit.set_exception(error)

    def _all_files_written(self) -> bool:
        """Waits for the manifests of all processes; False if another process failed."""
        expected = {Path(process_manifest(rank)).name: rank for rank in range(self.processes)}
        own, end = Path(process_manifest(self.process)).name, None
        folder, began = self.draft.folder / PROCESS_MANIFESTS, time.monotonic()
        what = f"the save of step {self.draft.step}, for the files of the others"
        with collecting(what, waits=True):
            while True:
                looked = time.monotonic()
                written = self.draft.written_manifests()
                missing = expected.keys() - written
                now = time.monotonic()
                if not missing:
                    break
                if own not in written:  # somebody has deleted the folder
                    raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(folder / own))
                if not _program_over.is_set() or _are_at_work([expected[x] for x in missing]):
                    end = None  # the watchdog says what it waits for
                elif end is None:
                    end = now + _EXIT_TIMEOUT
                elif now > end:
                    raise TimeoutError(f"{folder / min(missing)} was not written by its process")
                pause = max(_POLL, (now - began) / 20, _REST * (now - looked))
                if self._given_up.wait(min(pause, _LONGEST_POLL)):
                    break
        return not self._given_up.is_set()


def _are_at_work(ranks: Sequence[int]) -> bool:
    """Whether these processes can still write their files, and nobody waits for this one to end."""
    return not unfinished.is_exiting() and any(x.are_at_work(ranks) for x in watchdogs)


def _wait_at_exit() -> None:
    _program_over.set()
    for saving in list(_running):
        saving.join()
    for message in _failed.values():  # nobody waited, and nobody will
        print(f"gshard: {message}", file=sys.stderr)
    if unfinished.is_exiting() and _uncommitted is not None:
        # The first process could no longer commit without this one: all end when one has.
        step = _uncommitted.step
        end = time.monotonic() + _EXIT_TIMEOUT
        with unfinished.finished_first(f"the save of step {step}", "commit", step):
            while _uncommitted.is_open() and time.monotonic() < end:
                time.sleep(_POLL)


def _forget() -> None:
    """A forked child has neither the threads nor the saves, and must not wait for them."""
    global _uncommitted
    _running.clear()
    _failed.clear()
    _uncommitted = None


os.register_at_fork(after_in_child=_forget)
# A program that ends waits for its last save. Python waits for all threads, but stops executors
# before, and Orbax writes with these; nothing public comes earlier.
threading._register_atexit(_wait_at_exit)  # pyright: ignore[reportAttributeAccessIssue]
