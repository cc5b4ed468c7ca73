"""The directory of a run: which steps it contains, and how a step is added and removed.

A step is a folder named by its number. It is written under another name and renamed when it is
complete, and renamed before it is deleted, so a folder with a number is always a complete step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gshard._util.durable import remove_folder, rename
from gshard._util.errors import CallOrderError, GShardError
from gshard._util.validation import check_integer, shown

SAVING, DELETED, DAMAGED = ".saving", ".deleted", ".damaged"
_STEP = re.compile(r"0|[1-9][0-9]*")
_DEBRIS = re.compile(rf"({_STEP.pattern})((\.\d+)?{re.escape(SAVING)}|{re.escape(DELETED)})")
_LOCK = ".gshard_lock"
WRITTEN_LAST = MANIFEST, DESCRIPTION = "manifest.json", "gshard.json"


def as_directory(path: Any) -> Path:
    """The absolute path of a directory that exists or can be made.

    Raises:
      GShardError: it is not a path, or a file is in the way.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise GShardError(f"directory={shown(path)} must be the path of a directory.")
    try:
        folder = Path(path).expanduser().absolute()
        in_the_way = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise GShardError(f"directory={shown(path)} cannot be used: {error}.") from error
    if "://" in str(path):
        raise GShardError(
            f"directory={str(path)!r} is an address. gshard writes to file systems: mount the "
            "bucket, and give the path."
        )
    if in_the_way:
        raise GShardError(f"directory={str(path)!r} is a file. Choose another path.")
    return folder


# ---- steps ---------------------------------------------------------------------------------------


def steps_in(directory: Path) -> list[int]:
    """The steps of a directory, ascending; empty if the directory does not exist.

    A folder named by a number is a step if gshard wrote into it.

    Raises:
      GShardError: the directory cannot be read.
    """
    try:
        found = [x.name for x in os.scandir(directory) if x.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise GShardError(f"{directory} cannot be read: {error.strerror}.") from error
    numbers = [name for name in found if _STEP.fullmatch(name)]
    own = [x for x in numbers if any(os.path.lexists(directory / x / y) for y in WRITTEN_LAST)]
    return sorted(int(name) for name in own)


def existing_step(directory: Path, step: Any, steps: Sequence[int]) -> int:
    """A user's step as the number of one of `steps`.

    Raises:
      GShardError: there is no such step; the nearest are named.
    """
    number = check_integer("step", step, 0)
    if number not in steps:
        near = sorted(sorted(steps, key=lambda x: abs(x - number))[:3])
        known = f"The nearest are {near}." if near else "It holds no checkpoint."
        raise GShardError(f"step={number} is not in {directory}. {known}")
    return number


def temporary_folder(directory: Path, step: int, failed: int) -> Path:
    """The folder in which a step is written.

    Args:
      directory: the directory of the run.
      step: the step's number.
      failed: how many saves failed before; threads that still write for them use other folders.
    """
    return directory / f"{step}{f'.{failed}' if failed else ''}{SAVING}"


def step_of(folder: Path) -> int:
    """The number of the step that is written in a temporary folder."""
    return int(folder.name.partition(".")[0])


def commit(folder: Path) -> None:
    """Renames a complete temporary folder to its step."""
    rename(folder, folder.with_name(str(step_of(folder))))


def delete(directory: Path, step: int) -> None:
    """Deletes a step: at once for readers, then file by file."""
    remove_folder(directory / str(step), directory / f"{step}{DELETED}")


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged step, so that it can be examined and is no longer a step."""
    aside = directory / f"{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    rename(directory / str(step), aside)
    return aside


def remove_debris(directory: Path) -> None:
    """Removes what killed or failed saves and deletions left; only the writer may call it."""
    for name in os.listdir(directory):
        if _DEBRIS.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)


# ---- the lock of the writer ----------------------------------------------------------------------


def lock(directory: Path) -> int:
    """Makes this process the only writer, until it closes the returned descriptor or ends.

    Raises:
      CallOrderError: another process writes there.
    """
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise CallOrderError(
            f"{directory}: {who or 'another process'} writes its checkpoints there. Choose another "
            "directory, or end that one (in this process: checkpointer.close())."
        ) from error
    except OSError:  # a file system without locks
        return descriptor
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return descriptor


def unlock(descriptor: int) -> None:
    """Lets another process write, even if a forked child still has the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked_by(descriptor: int, directory: Path) -> bool:
    """Whether a descriptor of `lock` belongs to this directory, which may have been replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), (directory / _LOCK).stat())
    except OSError:
        return False


# ---- which steps are kept ------------------------------------------------------------------------


@dataclass(frozen=True)
class RetentionPolicy:
    """Which steps are kept: the newest, and each that any rule selects. Without rules, all.

    Attributes:
      last: how many of the newest steps.
      every: steps whose number is a multiple of it.
      best: how many steps with the best `metric`, of those that have it and where it is not NaN.
      metric: a key of `metadata`.
      mode: which metric is best.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                check_integer(f"keep_{name}", value, 1, " of steps (None: no such rule)")
        if not isinstance(self.metric, str) or not self.metric:
            raise GShardError(f"metric={shown(self.metric)} must be a key of metadata.")
        if self.mode not in ("min", "max"):
            raise GShardError(f"mode={shown(self.mode)} must be 'min' or 'max'.")

    @property
    def keeps_all(self) -> bool:
        """Whether there are no rules."""
        return self.last is self.every is self.best is None

    def to_delete(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps to delete, ascending, given each step's metadata."""
        if self.keeps_all:
            return []
        steps = sorted(metadata)
        kept = set(steps[-max(self.last or 1, 1) :])
        kept |= {step for step in steps if self.every and step % self.every == 0}
        known = {step: self._value(metadata[step]) for step in steps}
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * x, -step) for step, x in known.items() if x is not None)
        kept |= {-step for _, step in ranked[: self.best or 0]}
        return [step for step in steps if step not in kept]

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Raises a `GShardError` for metadata without the metric that `best` needs."""
        if self.best and not _is_number(metadata.get(self.metric)):
            raise GShardError(
                f"save: keep_best={self.best} needs the number {self.metric!r} in metadata, which "
                f"has {shown(metadata.get(self.metric))} there. Pass metadata={{{self.metric!r}: "
                "...}, or pass metric= to the Checkpointer."
            )

    def _value(self, metadata: Mapping[str, Any]) -> float | None:
        value = metadata.get(self.metric)
        return None if not _is_number(value) or value != value else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
