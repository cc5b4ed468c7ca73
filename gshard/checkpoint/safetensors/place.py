"""`Place`: where a file is, a path of a file system or an `ObjectPath` in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from gshard._util.durable import NewFile, file_path
from gshard.checkpoint.bucket import Bucket, Upload
from gshard.checkpoint.open_store import resolve


class ObjectPath:
    """An object, or a folder of objects, with those methods of a `Path` that are needed here."""

    def __init__(self, bucket: Bucket, key: str):
        self.bucket, self.key = bucket, key
        self.name = key.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def parent(self) -> ObjectPath:
        """The folder of the object."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    @cached_property
    def size(self) -> int | None:
        """The bytes of the object when they were first asked for; None if there is none."""
        return self.bucket.size(self.key) if self.key else None

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return self.size is not None

    def is_dir(self) -> bool:
        """Whether there are objects below it; a bucket is a folder also without."""
        return not self.is_file() and (bool(self.bucket.list(self.key)) or not self.key)

    def iterdir(self) -> Iterator[ObjectPath]:
        """What is directly in the folder."""
        return (self / name for name in self.bucket.list(self.key))

    def unlink(self) -> None:
        """Deletes the object."""
        self.bucket.delete([self.key])


Place: TypeAlias = Path | ObjectPath


def place_of(given: Any, call: str, path_of: Callable[[Any, str], Path] = file_path) -> Place:
    """What a user's path or address names."""
    where, in_store = resolve(given, f"{call}: path")
    if not in_store:
        return path_of(where, call)
    scheme, _, rest = where.partition("://")
    bucket, _, key = rest.partition("/")
    return ObjectPath(Bucket(f"{scheme}://{bucket}"), key.strip("/"))


def size_of(file: Place) -> int:
    """The bytes of a file; a `FileNotFoundError` if there is none."""
    if isinstance(file, Path):
        return file.stat().st_size
    if file.size is None:
        raise FileNotFoundError(str(file))
    return file.size


def version_of(file: Place) -> object:
    """A value that changes when the file is written again or replaced; None without a file."""
    if isinstance(file, ObjectPath):
        return file.bucket.version(file.key)
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_range(file: Place, start: int, end: int) -> bytes:
    """Some bytes of a file; fewer where it ends."""
    if isinstance(file, ObjectPath):
        return file.bucket.read(file.key, start, end)
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(max(end - start, 0))


def new_file(file: Place, size: int, call: str) -> NewFile | Upload:
    """A file of that many bytes that appears under its name once it is complete."""
    if isinstance(file, ObjectPath):
        return Upload(file.bucket, file.key, size)
    return NewFile(file, call)
