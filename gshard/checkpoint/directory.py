"""The directory of a run: which steps it holds, and how one comes and goes.

A step is a folder named by its number. It is written under another name and renamed when it is
complete, and renamed before it is deleted, so a folder with a number is never half of a step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
      GShardError: it is no path, or a file is in the way.
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


def make(directory: Path) -> None:
    """Makes a directory, and those above it, on the disk."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)


def steps_in(directory: Path) -> list[int]:
    """The steps of a directory, ascending; none where there is no directory.

    A folder that has a number is one when gshard wrote into it.

    Raises:
      GShardError: it cannot be read.
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


def delete(directory: Path, step: int) -> None:
    """Deletes a step: at once for whoever looks, then file by file."""
    doomed = directory / f"{step}{DELETED}"
    shutil.rmtree(doomed, ignore_errors=True)
    (directory / str(step)).rename(doomed)
    fsync(directory)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged step, so that it can be looked at and is no step any more."""
    aside = directory / f"{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    (directory / str(step)).rename(aside)
    fsync(directory)
    return aside


def saving(directory: Path, step: int, lost: int) -> Path:
    """The folder in which a step is written.

    Args:
      directory: of the run.
      step: its number.
      lost: saves before that failed: what still writes for them must not meet this one.
    """
    return directory / f"{step}{f'.{lost}' if lost else ''}{SAVING}"


def step_of(written: Path) -> int:
    """The number of the step that is written in a folder."""
    return int(written.name.partition(".")[0])


def commit(written: Path) -> None:
    """Makes a complete folder of `saving` the step N."""
    written.rename(written.with_name(str(step_of(written))))
    fsync(written.parent)


def clean(directory: Path) -> None:
    """Removes what saves and deletions that were killed or failed left behind; for the writer."""
    for name in os.listdir(directory):
        if _DEBRIS.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)


def lock(directory: Path) -> int:
    """Makes this process the one that writes, until it closes the descriptor returned, or ends.

    Raises:
      CallOrderError: another one writes there.
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
    """Lets another one write; a forked child may still hold the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked_by(descriptor: int, directory: Path) -> bool:
    """Whether a descriptor of `lock` is of this directory, which may have been made anew."""
    try:
        return os.path.samestat(os.fstat(descriptor), (directory / _LOCK).stat())
    except OSError:
        return False


def fsync(path: Path) -> None:
    """Brings a file, or the names in a folder, onto the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_durably(path: Path, data: bytes) -> None:
    """A file with this content, on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Keep:
    """A step stays when any of these wants it, and the newest always. All None: all stay.

    Attributes:
      last: the newest so many.
      every: those whose number it divides.
      best: so many with the best `metric`; a step without it, or with NaN, is never one of them.
      metric: a key of `metadata`.
      mode: `"min"` or `"max"`: which is best.
    """

    last: int | None
    every: int | None
    best: int | None
    metric: str
    mode: str

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
    def all(self) -> bool:
        """Whether nothing ever goes."""
        return self.last is self.every is self.best is None

    def to_delete(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps that go, ascending, of steps with their metadata."""
        if self.all:
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
        """Refuses metadata that say nothing of how good a step is, where the best are to stay."""
        if self.best and not _is_number(metadata.get(self.metric)):
            raise GShardError(
                f"save: keep_best={self.best} needs the number {self.metric!r} in metadata, which "
                f"has {shown(metadata.get(self.metric))} there. Pass metadata={{{self.metric!r}: "
                "...}, or say metric= of the Checkpointer."
            )

    def _value(self, metadata: Mapping[str, Any]) -> float | None:
        value = metadata.get(self.metric)
        return None if not _is_number(value) or value != value else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
