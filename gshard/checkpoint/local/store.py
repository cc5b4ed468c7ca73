"""`LocalStore`: the newest steps of a run in a folder of this machine, of each process its shards.

Each process has a folder there, named by its place among the processes of its machine, and commits
its part of a step alone: nothing is sent. Whether the machines have all of a step together is found
out when it is read. Parts of one save have one token, so those of two saves are never mixed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax

from gshard._util.durable import make_folder
from gshard._util.errors import GShardError, some
from gshard.checkpoint.bounds import Bounds, bounds_of
from gshard.checkpoint.disk import Disk, DiskDraft, as_directory
from gshard.checkpoint.local.shards import (
    INDEX,
    Index,
    Key,
    copy_to_host,
    own_shards,
    read_index,
    write_shards,
)
from gshard.checkpoint.manifest import process_manifest
from gshard.checkpoint.open_store import resolve
from gshard.checkpoint.step_files import StoreError, why
from gshard.checkpoint.step_info import STEP, StepInfo
from gshard.distributed.agree import all_gather_text, run_on_all

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CALL = "Checkpointer(local=...)"
_MARK = "machine"  # the file that makes a folder one of gshard's
_PROCESS = re.compile(r"process-(\d+)")  # the folder of a process
_OURS = re.compile(rf"{_PROCESS.pattern}|{_MARK}|\.{_MARK}\..*")  # also while others make them


class LocalStore(Disk):
    """The steps of this process in its folder of the machine. All processes must make one.

    Args:
      folder: the folder of this machine.
      run: the address of the run's directory.
      rhythm: how often steps are saved, which must be the same on all processes.

    Raises:
      GShardError: the folder holds steps of another run or other files, or several machines see it.
    """

    is_shared = False

    def __init__(self, folder: Path, run: str, rhythm: str):
        self.machine, self.run = folder, run
        boot, token = run_on_all(lambda: _machine(folder, run), call=_CALL, what=lambda: rhythm)
        own = f"{boot} {token}"
        machines = all_gather_text(own, what=_CALL)  # by rank
        same = {machine for machine in machines.values() if machine.endswith(f" {token}")}
        run_on_all(lambda: _refuse_shared(folder, same), call=_CALL)
        self._here = [r for r, machine in sorted(machines.items()) if machine == own]
        self._place = self._here.index(jax.process_index())
        super().__init__(folder / f"process-{self._place}")
        drawn = all_gather_text(secrets.token_hex(8), what=_CALL)
        self._session, self._saves = drawn[min(drawn)], 0

    def __str__(self) -> str:
        return str(self.machine)

    def why_empty(self) -> str:
        """Ends the sentence "<address> ..." about a machine without steps."""
        return "holds no step."

    def open_for_writing(self) -> None:
        """Locks this process's folder, and removes what a killed save left there."""
        if not (self.machine / _MARK).exists():  # somebody has deleted the folder
            try:
                _machine(self.machine, self.run)
            except GShardError as error:  # an error before training, but a warning at a save
                raise StoreError(str(error)) from error
        super().open_for_writing()

    def drop(self, steps: Callable[[int], bool]) -> None:
        """Deletes some steps of this process, and of processes that the machine has no more."""
        folders = [self.directory]
        if self._place == 0:
            known = {f"process-{i}" for i in range(len(self._here))}
            folders += [x for x in _of_processes(self.machine) if x.name not in known]
        for folder in folders:
            for step in [int(x.name) for x in _steps_in(folder)]:
                if steps(step):
                    Disk(folder).delete(step)
            if folder != self.directory and not any(_steps_in(folder)):
                shutil.rmtree(folder, ignore_errors=True)

    def is_taken(self, step: int) -> bool:
        """True: a process does not know what the others have, and all must do the same."""
        return True

    def _written_last(self, name: str) -> list[Path]:
        return [self.directory / name / INDEX]

    def draft(self, step: int, token: str) -> LocalDraft:
        """A draft of this process's part of a step."""
        path = super().draft(step, token).folder
        return LocalDraft(path, step, self, f"{self._session}-{self._saves}")

    def next_save(self) -> None:
        """Another token from now on; called before each save, on every process."""
        self._saves += 1

    def parts(self, step: int) -> list[Index]:
        """What the processes of this machine have of a step, as far as it can be read."""
        found = _readable(folder / str(step) for folder in _of_processes(self.machine))
        return [index for index in found if index.noted["run"] == self.run]

    def others_keep(self, arrays: Mapping[str, jax.Array]) -> set[Key]:
        """The shards of this process that an earlier one of this machine writes."""
        before = frozenset(r for r in self._here if r < jax.process_index())
        found: set[Key] = set()
        for path, x in arrays.items() if before else ():
            found |= {Key(path, b) for b in _held_by(before, x.sharding, x.shape)}
        return found


class LocalDraft(DiskDraft):
    """The part of a step that one process writes."""

    def __init__(self, folder: Path, step: int, store: LocalStore, token: str):
        super().__init__(folder, step)
        self._store, self._token = store, token

    def make(self, info: StepInfo) -> None:
        """Makes the folder."""
        self.folder.mkdir()

    def begin(self, arrays: Mapping[str, jax.Array], data: Any) -> Callable[[], object]:
        """Copies the shards of this process to the host; `data` is noted beside them."""
        own = own_shards(arrays, self._store.others_keep(arrays))
        self._store.check_room(sum(x.nbytes for x in own.values()))
        shards, rank = copy_to_host(own), jax.process_index()
        noted = {"token": self._token, "run": self._store.run, "rank": rank, **data}
        return lambda: write_shards(self.folder, shards, noted)

    def written_manifests(self) -> set[str]:
        """As if it were the only process that writes."""
        return {Path(process_manifest(0)).name} if (self.folder / INDEX).exists() else set()

    def combine(self, processes: int) -> None:
        """Does nothing: the part is complete."""

    def discard(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def local_folder(given: Any, directory: Path | str) -> Path:
    """The folder of this machine that a user names, apart from the run's directory."""
    path, in_store = resolve(given, "local")
    if in_store:
        raise GShardError(f"local={path!r} is an address. Choose a folder of each machine.")
    try:
        folder = as_directory(path)
    except GShardError as error:
        raise GShardError(str(error).replace("directory=", "local=")) from error
    if isinstance(directory, Path):
        if folder.is_relative_to(directory) or directory.is_relative_to(folder):
            raise GShardError(
                f"local={str(folder)!r} and the directory {directory} are inside each other. "
                "Choose a folder of the machine's own, in memory (/dev/shm) or on its own disk."
            )
    return folder


def _machine(folder: Path, run: str) -> tuple[str, str]:
    """What tells this machine from any other, and its folder from any other."""
    try:
        if not folder.exists():
            make_folder(folder)
            folder.chmod(0o700)  # /dev/shm belongs to all users of a machine
        if not (folder / _MARK).exists():
            if others := some(x.name for x in folder.iterdir() if not _OURS.fullmatch(x.name)):
                raise GShardError(
                    f"local={str(folder)!r} has other files: {others}. Choose a folder of its own."
                )
            new = folder / f".{_MARK}.{secrets.token_hex(4)}"
            new.write_text(secrets.token_hex(8))
            with suppress(FileExistsError):  # another process of this machine was first
                os.link(new, folder / _MARK)
            new.unlink()
        token = (folder / _MARK).read_text()
    except OSError as error:
        raise GShardError(
            f"local={str(folder)!r} cannot be used: {why(error)}. Choose another folder."
        ) from error
    steps = (step for process in _of_processes(folder) for step in _steps_in(process))
    if others := {index.noted["run"] for index in _readable(steps)} - {run}:
        raise GShardError(
            f"local={str(folder)!r} holds the newest steps of another run, whose directory is "
            f"{min(others)}. Choose another folder, or delete this one if that run is finished."
        )
    return _BOOT.read_text().strip() if _BOOT.exists() else "", token


def _refuse_shared(folder: Path, machines: set[str]) -> None:
    if len(machines) > 1:
        raise GShardError(
            f"several machines see the same folder local={str(folder)!r}. Choose a folder that "
            "each has of its own, in memory (/dev/shm) or on its own disk."
        )


def _of_processes(machine: Path) -> list[Path]:
    if not machine.is_dir():  # somebody has deleted the folder
        return []
    return sorted(x for x in machine.iterdir() if _PROCESS.fullmatch(x.name) and x.is_dir())


def _steps_in(process: Path) -> list[Path]:
    return [x for x in process.iterdir() if STEP.fullmatch(x.name)] if process.exists() else []


def _readable(steps: Iterable[Path]) -> list[Index]:
    """What the folders of steps have; one that cannot be read counts as lost."""
    found = []
    for step in steps:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(read_index(step))
    return found


@cache
def _held_by(ranks: frozenset[int], sharding: Any, shape: tuple[int, ...]) -> frozenset[Bounds]:
    """The shards of an array that devices of these processes hold."""
    indices = sharding.devices_indices_map(shape)
    return frozenset(bounds_of(x, shape) for d, x in indices.items() if d.process_index in ranks)
