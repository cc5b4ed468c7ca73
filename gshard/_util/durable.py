"""Files and folders that are complete or absent, even after a crash or a power failure.

Each is written under a temporary name, synced to the disk, and renamed; then its folder is synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown


def fsync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk.

    A folder that this process may not read, or of a file system that syncs no folders, is left to
    the system, as PostgreSQL does (`fsync_fname_ext`).
    """
    ignored = (errno.EACCES, errno.EINVAL, errno.EBADF) if path.is_dir() else ()
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in ignored:
            raise


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


def refuse_variables(path: Any, argument: str) -> None:
    """Refuses a path with `$SCRATCH` in it, which would be part of the name of a new folder."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    names = isinstance(text, str) and re.search(r"\$\{?[A-Za-z_]", text)
    if names and not os.path.exists(text):
        raise GShardError(
            f"{argument}={text!r} names an environment variable, which only a shell replaces. Pass "
            f"os.path.expandvars({text!r})."
        )


def file_path(path: Any, call: str) -> Path:
    """The absolute path of a file that a user names, with links followed; or a `GShardError`."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise GShardError(f"{call}: path={shown(path)} must be the path of a file.")
    try:
        return Path(os.fsdecode(path)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, no home, a NUL
        raise GShardError(f"{call}: path={shown(path)} leads nowhere: {error}.") from error


def folder_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder; TensorStore refuses one that contains `..`.

    Raises:
      OSError, RuntimeError or ValueError: links in a circle, no home, a NUL.
    """
    folder = Path(path).expanduser().absolute()
    # The parent of a link's target is not that of the link; links are kept wherever they can be.
    return folder.resolve() if ".." in folder.parts else folder


def read_regular(path: Path, most: int) -> bytes:
    """Reads a file; an `OSError` for what is no regular file, or has more than `most` bytes."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait
    with os.fdopen(number, "rb") as file:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"it has {about.st_size:,} bytes, and {most:,} are allowed")
        return file.read(most)


class NewFile:
    """A file that is written under a hidden name next to `path`; `commit` renames it to `path`.

    Leaving the context without `commit` removes the hidden file and keeps what is at `path`. Only a
    killed process leaves the hidden file, `.NAME.XXXXXXXX.new`. Errors of the file system become
    `GShardError`s that name `call`, the user's call, if that is given; then what killed processes
    left is removed first.
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
            if self._call:
                self._remove_leftovers()
            self._file = self._new.open("xb")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def _remove_leftovers(self) -> None:
        """Removes hidden files for this name that no living process has locked."""
        name = re.compile(rf"\.{re.escape(self._path.name)}\.[0-9a-f]{{8}}\.new")
        for path in [x for x in self._path.parent.iterdir() if name.fullmatch(x.name)]:
            with contextlib.suppress(OSError):
                number = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(number)

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
            kept = "What was there is unchanged. " if os.path.exists(self._path) else ""
            raise GShardError(
                f"{self._call}: {self._path} cannot be written: {error.strerror or error}. {kept}"
                "Choose a folder that exists, is writable and has room."
            ) from error
