"""`Disk`: the steps of a run in a folder of a file system.

A step is a folder named by its number. It is written under another name and renamed when it is
complete, and renamed before it is deleted, so a folder with a number is always a complete step.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from gshard._util.durable import (
    folder_path,
    fsync,
    make_folder,
    remove_folder,
    rename,
    write_file,
)
from gshard._util.errors import GShardError, some, warn
from gshard._util.validation import shown
from gshard.checkpoint.checksums import Damage, verify_step
from gshard.checkpoint.disk_lock import is_locked_by, lock, unlock
from gshard.checkpoint.manifest import PROCESS_MANIFESTS
from gshard.checkpoint.orbax import ARRAYS
from gshard.checkpoint.own_files import begin_files, combine
from gshard.checkpoint.read_arrays import read_arrays
from gshard.checkpoint.step_files import StepFolder, StoreError, why
from gshard.checkpoint.step_info import DAMAGED, DATA, DESCRIPTION, STEP, WRITTEN_LAST, StepInfo
from gshard.checkpoint.store import Wanted, Wants

SAVING, DELETED = ".saving", ".deleted"
# Drafts have the token of their save.
_DEBRIS = re.compile(
    rf"({STEP.pattern})(\.[0-9a-f]{{8}}-\d+{re.escape(SAVING)}|{re.escape(DELETED)})"
)


def as_directory(path: Any) -> Path:
    """The absolute path of a directory that exists or can be made."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise GShardError(f"directory={shown(path)} must be the path of a directory.")
    try:
        folder = folder_path(path)
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise GShardError(f"directory={shown(path)} cannot be used: {error}.") from error
    if "://" in str(path):
        raise GShardError(
            f"directory={str(path)!r} is an address, and this needs a folder of a file system. "
            "Choose a path."
        )
    if is_file:
        raise GShardError(f"directory={str(path)!r} is a file. Choose another path.")
    if bad := [x for x in "*?[\\" if x in str(folder)]:  # of a pattern, as which Orbax reads it
        raise GShardError(
            f"directory={str(path)!r}: the path {folder} contains {' '.join(bad)}. Orbax would not "
            "find its files there, or would find those of other directories. Choose a path "
            "without these characters."
        )
    return folder


class Disk:
    """The steps of a run in one directory."""

    is_shared = True
    is_remote = False

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock: int | None = None
        self._told_of_links = False
        self._unlock: Callable[[], object] = str

    def __str__(self) -> str:
        return str(self.directory)

    def steps(self) -> list[int]:
        """The steps, ascending; empty if the directory does not exist.

        A folder named by a number is a step if gshard wrote into it.
        """
        try:
            entries = [*os.scandir(self.directory)]
            found = [x.name for x in entries if x.is_dir(follow_symlinks=False)]
            numbers = [name for name in found if STEP.fullmatch(name)]
            steps = [int(x) for x in numbers if any(map(_is_there, self._written_last(x)))]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # a step that cannot be looked at may be the newest
            fix = ""
            if error.filename not in (None, str(self)):
                fix = " If that folder is not a checkpoint, move it away."
            place = error.filename or self
            raise StoreError(f"{place} cannot be read: {why(error)}.{fix}") from error
        links = sorted(x.name for x in entries if STEP.fullmatch(x.name) and x.is_symlink())
        if links and not self._told_of_links:
            self._told_of_links = True
            warn(
                f"{self}: symbolic links are not read as steps ({some(links)}), because deleting "
                "one would not delete the step. Move the folder itself there."
            )
        return sorted(steps)

    def _written_last(self, name: str) -> list[Path]:
        return [self.directory / name / file for file in WRITTEN_LAST]

    def step(self, number: int) -> StepFolder:
        """The files of a step."""
        return StepFolder(self.directory / str(number))

    def why_empty(self) -> str:
        """Ends the sentence "<address> ..." about a directory without steps."""
        if not self.directory.is_dir():
            return "does not exist."
        theirs = some(x.parent.name for x in self.directory.glob("*/_CHECKPOINT_METADATA"))
        hint = f" Orbax itself wrote {theirs}: read it with gshard.import_orbax." if theirs else ""
        found = [x for name in WRITTEN_LAST for x in self.directory.glob(f"*/*/{name}")]
        if below := {x.parents[1].name for x in found if STEP.fullmatch(x.parent.name)}:
            hint += (
                f" Checkpoints are in its subdirectories: {some(sorted(below))}. Pass one of them."
            )
        return f"holds no checkpoint.{hint}"

    def reader(self, verify: bool) -> DiskReader:
        """Reads arrays, and compares checksums if `verify`."""
        return DiskReader(self, verify)

    def open_for_writing(self) -> None:
        """Locks the directory, and removes what killed and failed saves left."""
        if not self.is_locked():
            self.close()  # the directory was deleted
        if self._lock is None:
            make_folder(self.directory)
            self._lock = lock(self.directory)
            # The user may forget to close.
            self._unlock = weakref.finalize(self, unlock, self._lock)
        for name in os.listdir(self.directory):
            if _DEBRIS.fullmatch(name):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def is_locked(self) -> bool:
        """Whether this object has locked the directory, which nobody has deleted since."""
        return self._lock is not None and is_locked_by(self._lock, self.directory)

    def close(self) -> None:
        """Unlocks the directory."""
        if self._lock is not None:
            self._unlock()
            self._lock = None

    def draft(self, step: int, token: str) -> DiskDraft:
        """A draft of a step, in a folder that no other save writes into."""
        return DiskDraft(self.directory / f"{step}.{token}{SAVING}", step)

    def is_taken(self, step: int) -> bool:
        """Whether there is a folder of that name."""
        return (self.directory / str(step)).exists()

    def check_room(self, size: int) -> None:
        """Raises an `OSError` if the disk has fewer bytes free."""
        free = shutil.disk_usage(self.directory).free
        if size > free:
            raise OSError(f"the disk has {free:,} bytes free, and the step needs {size:,}")

    def set_aside(self, step: int) -> str:
        """Renames a damaged step, so that it can be examined and is no longer a step."""
        aside = self.directory / f"{step}{DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        rename(self.directory / str(step), aside)
        return str(aside)

    def delete(self, step: int) -> None:
        """Deletes a step: at once for readers, then file by file."""
        remove_folder(self.directory / str(step), self.directory / f"{step}{DELETED}")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class DiskDraft:
    """A step that is being written, in a folder that all processes see."""

    def __init__(self, folder: Path, step: int):
        self.folder, self.step = folder, step

    def __str__(self) -> str:
        return str(self.folder)

    def make(self, info: StepInfo) -> None:
        """Makes the folder; none is left if that fails."""
        try:
            for name in (".", ARRAYS, PROCESS_MANIFESTS, DATA):
                (self.folder / name).mkdir()
            write_file(self.folder / DESCRIPTION, info.to_json())
        except BaseException:
            self.discard()
            raise

    def join(self) -> None:
        """Refuses a folder that this process does not see."""
        if not self.folder.is_dir():
            raise GShardError(
                f"save: process {jax.process_index()} does not see {self.folder}, which process 0 "
                "has made. All processes need one directory, on a file system that all machines "
                "share."
            )

    def begin(self, arrays: Mapping[str, jax.Array], data: bytes | None) -> Callable[[], object]:
        """Begins to write this process's files into the folder, where the others look."""
        return begin_files(self.folder, arrays, data)

    def written_manifests(self) -> set[str]:
        """The names of the process manifests."""
        return {*os.listdir(self.folder / PROCESS_MANIFESTS)}

    def combine(self, processes: int) -> None:
        """Lists the files of all, which are in the folder."""
        combine(self.folder, processes)

    def commit(self) -> str:
        """Renames the folder to the number of the step."""
        step = self.folder.with_name(str(self.step))
        os.rename(self.folder, step)
        try:
            fsync(step.parent)
        except OSError:  # it is reported as not saved, so it must be possible to save it again
            with contextlib.suppress(OSError):
                os.rename(step, self.folder)
            raise
        return str(step)

    def is_open(self) -> bool:
        """Whether the folder is there under this name."""
        return self.folder.exists()

    def discard(self) -> None:
        """Deletes the folder, in the first process."""
        if jax.process_index() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


class DiskReader:
    """Reads the files where they are. Each process verifies its share of a step before."""

    def __init__(self, disk: Disk, verify: bool):
        self._disk, self._verify = disk, verify

    def damages(self, step: int, wants: Wants) -> list[Damage]:
        """The damages in this process's share of the files."""
        if not self._verify:
            return []
        return verify_step(self._disk.step(step), (jax.process_index(), jax.process_count()))

    def files(self, step: int) -> StepFolder:
        """The files of the step."""
        return self._disk.step(step)

    def read(self, step: int, wanted: Wanted) -> dict[str, jax.Array]:
        """Arrays by path."""
        return read_arrays(self._disk.step(step).path / ARRAYS, wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
