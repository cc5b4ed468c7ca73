"""Files and folders that are complete or absent, even after a crash or a power failure.

Each is written under a temporary name, synced to the disk, and renamed; then its folder is synced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown


def fsync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def rename(old: Path, new: Path) -> None:
    """Renames what is on the disk already, and syncs the folder that contains it."""
    os.rename(old, new)
    fsync(new.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, and syncs them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)


def remove_folder(folder: Path, doomed: Path) -> None:
    """Renames a folder to `doomed`, so that nobody finds a part of it, and deletes its files."""
    shutil.rmtree(doomed, ignore_errors=True)
    rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def replace_folder(new: Path, folder: Path, old: Path) -> None:
    """Renames a complete folder to `folder`. The one before is called `old` until then."""
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        rename(folder, old)
    rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Writes a file that is complete and on the disk, or absent."""
    with NewFile(path) as file:
        file.write(data)
        file.commit()


def file_path(path: Any, call: str) -> Path:
    """The absolute path of a file that a user names, with links followed; or a `GShardError`."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise GShardError(f"{call}: path={shown(path)} must be the path of a file.")
    try:
        return Path(os.fsdecode(path)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, no home, a NUL
        raise GShardError(f"{call}: path={shown(path)} leads nowhere: {error}.") from error


class NewFile:
    """A file that is written under a hidden name next to `path`; `commit` renames it to `path`.

    Leaving the context without `commit` removes the hidden file and keeps what is at `path`. Only a
    killed process leaves the hidden file, `.NAME.XXXXXXXX.new`. Errors of the file system become
    `GShardError`s that name `call`, the user's call, if that is given.
    """

    def __init__(self, path: Path, call: str | None = None):
        self._path, self._call = path, call
        self._new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")

    def __enter__(self) -> NewFile:
        with self._explained():
            # A rename would replace a device such as /dev/null too.
            if self._call and self._path.exists() and not self._path.is_file():
                what = "folder" if self._path.is_dir() else "device or the like"
                raise GShardError(
                    f"{self._call}: {self._path} is a {what}. Choose another name for the file."
                )
            self._file = self._new.open("xb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        with self._explained():
            self._file.write(data)

    def commit(self) -> None:
        """Syncs the file to the disk and gives it its name."""
        with self._explained():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.rename(self._new, self._path)
        with contextlib.suppress(OSError):  # the file has its name already
            fsync(self._path.parent)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()  # writes what is buffered, which fails again on a full disk
        with contextlib.suppress(OSError):
            self._new.unlink()  # it is renamed already after a commit

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except OSError as error:
            if self._call is None:
                raise
            raise GShardError(
                f"{self._call}: {self._path} cannot be written: {error.strerror or error}. What "
                "was there is unchanged. Choose a folder that exists, is writable and has room."
            ) from error
