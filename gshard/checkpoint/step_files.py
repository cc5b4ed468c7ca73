"""The files of one step: `StepFolder` is a step in a folder of a file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

from gshard._util.crc32 import crc32
from gshard._util.durable import read_regular
from gshard._util.errors import CallOrderError, OutsideError

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 2**22  # bytes that a thread reads at once
THREADS = min(16, os.cpu_count() or 1)

_PASSING = [  # of a network file system, of this process, of permissions
    getattr(errno, name, 0)  # macOS lacks one
    for name in (
        "ESTALE", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ECONNREFUSED",
        "ECONNABORTED", "ECONNRESET", "ENETDOWN", "ENETUNREACH", "ESHUTDOWN", "EREMOTEIO",
        "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EINTR", "EACCES", "EPERM",
    )
]  # fmt: skip

Progress = Callable[[int], object]  # called with the number of bytes of every block that was read


class StoreError(Exception):
    """An object store or a disk refused a request, or did not answer.

    It is no `OSError`, which tells that a file is damaged: nothing is known of the files.
    """

    is_outside = True


class StorageError(OutsideError):
    """A `StoreError`, as a user's call raises it."""


class InUseError(CallOrderError, OutsideError):
    """Another process writes its checkpoints there."""


@contextmanager
def store_errors_explained() -> Iterator[None]:
    """A `StoreError` becomes a `StorageError`."""
    try:
        yield
    except StoreError as error:
        raise StorageError(str(error)) from error


def ignore(count: int) -> None:
    """A `Progress` that nobody sees."""


class StepFiles(Protocol):
    """The files of one step, wherever they are; each is named by its path within the step.

    `str` of it is the address of the step.
    """

    @property
    def name(self) -> str:
        """The name of the step's folder, its number if nobody renamed it."""
        ...

    def names(self) -> set[str]:
        """The names of all files, and of what is there in the place of a file."""
        ...

    def is_regular(self, name: str) -> bool:
        """Whether a name is that of a file, and not of a link, a pipe or the like.

        Raises:
          FileNotFoundError: there is nothing of that name.
        """
        ...

    def size(self, name: str) -> int:
        """The bytes of a file."""
        ...

    def read(self, name: str, most: int) -> bytes:
        """The content of a file of at most `most` bytes; an `OSError` if it cannot be read."""
        ...

    def checksums(self, name: str, lengths: Sequence[int], progress: Progress) -> list[int]:
        """CRC-32 of each of the segments of a file; -1 for one that ends early."""
        ...


class StepFolder:
    """The files of a step in a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    def names(self) -> set[str]:
        """The path of everything that is not a folder, within the step."""

        def refuse(error: OSError) -> None:
            raise error

        found: set[str] = set()
        for folder, folders, names in os.walk(self.path, onerror=refuse):
            inside = Path(folder)
            links = [name for name in folders if (inside / name).is_symlink()]
            found |= {(inside / x).relative_to(self.path).as_posix() for x in [*names, *links]}
        return found

    def is_regular(self, name: str) -> bool:
        """Whether a name is that of a regular file."""
        return stat.S_ISREG((self.path / name).lstat().st_mode)

    def size(self, name: str) -> int:
        """The bytes of a file."""
        return (self.path / name).stat().st_size

    def read(self, name: str, most: int) -> bytes:
        """The content of a regular file."""
        return read_regular(self.path / name, most)

    def checksums(
        self, name: str, lengths: Sequence[int], progress: Progress = ignore
    ) -> list[int]:
        """CRC-32 of each of the segments of a file; -1 for one that ends early."""
        with (self.path / name).open("rb") as file:
            number = file.fileno()

            def read(start: int, size: int) -> bytes:
                return os.pread(number, size, start)

            return checksums_of(read, lengths, progress, _BLOCK, THREADS)


def checksums_of(
    read: Callable[[int, int], bytes],
    lengths: Sequence[int],
    progress: Progress,
    block: int,
    threads: int,
) -> list[int]:
    """CRC-32 of each of the segments of a file; -1 for one that ends early.

    `read(start, size)` returns bytes of the file, fewer where it ends; at most `block` at once.
    """

    def checksum(segment: tuple[int, int]) -> int:
        return checksum_of(read, *segment, progress, block)

    starts = accumulate(lengths, initial=0)
    return run_parallel(checksum, list(zip(starts, lengths, strict=False)), threads)


def checksum_of(
    read: Callable[[int, int], bytes],
    start: int,
    length: int,
    progress: Progress = ignore,
    block: int = _BLOCK,
) -> int:
    """CRC-32 of a segment of a file; -1 if it ends early."""
    total, end = 0, start + length
    while start < end and (found := read(start, min(end - start, block))):
        total, start = crc32(found, total), start + len(found)
        progress(len(found))
    return total if start == end else -1


def run_parallel(act: Callable[[T], R], items: Collection[T], threads: int) -> list[R]:
    """`act` of each item, by threads; an error of one is raised, and the others are not begun."""
    if len(items) < 2:  # also when the interpreter ends, and no thread can be started
        return [*map(act, items)]
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(act, items)]


def size_of(step: StepFiles) -> int:
    """The bytes of all regular files of a step."""
    return sum(step.size(name) for name in step.names() if step.is_regular(name))


def may_pass(error: OSError) -> bool:
    """Whether an error tells nothing of the file: the next try may read it."""
    return error.errno in _PASSING


def why(error: OSError) -> str:
    """The reason of an `OSError`, in the system's words."""
    return error.strerror or os.strerror(error.errno or errno.EIO)
