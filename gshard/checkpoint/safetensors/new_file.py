"""A file that takes its place when it is complete, and arrays as the bytes to write into it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import shown

BLOCK = 2**23  # bytes that are copied at a time where an array does not lie in order


def file_path(path: Any, call: str) -> Path:
    """A user's path of a file, absolute, links followed.

    Raises:
      GShardError: it is no path.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise GShardError(f"{call}: path={shown(path)} must be the path of a file.")
    try:
        return Path(os.fsdecode(path)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, no home, a NUL
        raise GShardError(f"{call}: path={shown(path)} leads nowhere: {error}.") from error


class NewFile:
    """Bytes under a hidden name beside `path`, which `commit` renames into place.

    A context that is left without `commit` leaves nothing, and what was at `path` as it was. Only a
    process that is killed leaves the hidden file, `.NAME.XXXXXXXX.new`.

    Raises:
      GShardError: (from every method) the file system refuses; says what it said.
    """

    def __init__(self, path: Path, call: str):
        self._path, self._call = path, call
        self._new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        self._file: BinaryIO | None = None

    def __enter__(self) -> NewFile:
        try:
            # A rename would replace a device such as /dev/null too.
            if self._path.exists() and not self._path.is_file():
                what = "folder" if self._path.is_dir() else "device or the like"
                raise GShardError(
                    f"{self._call}: {self._path} is a {what}. Choose another name for the file."
                )
            self._file = self._new.open("xb")
        except OSError as error:
            raise self._refused(error) from error
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        try:
            self._opened().write(data)
        except OSError as error:
            raise self._refused(error) from error

    def commit(self) -> None:
        """Makes sure that all is on disk, and gives the file its name."""
        file = self._opened()
        try:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._new, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise self._refused(error) from error

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()  # writes what is left, which fails again where the disk is full
        with contextlib.suppress(OSError):
            self._new.unlink()  # gone already where it was given its name

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("NewFile is used as a context: with NewFile(...) as file.")
        return self._file

    def _refused(self, error: OSError) -> GShardError:
        return GShardError(
            f"{self._call}: {self._path} cannot be written: {error.strerror or error}. What was "
            "there is as it was. Choose a folder that exists, may be written to and has room."
        )


def row_major(x: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in row-major order.

    One that lies in order is not copied; of another a block at a time is.
    """
    if x.flags.c_contiguous:
        yield x.reshape(-1).view(np.uint8).data
        return
    each = x.nbytes // len(x)
    if each > BLOCK:
        for row in x:
            yield from row_major(row)
        return
    rows = BLOCK // each
    for i in range(0, len(x), rows):
        yield from row_major(np.ascontiguousarray(x[i : i + rows]))


def _sync_folder(folder: Path) -> None:
    """The new name on disk too, where the system can: the file is in place already."""
    with contextlib.suppress(OSError, AttributeError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
