"""The files of a log folder: only their owner may read them, and their size has a limit."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from gshard._util.errors import GShardError
from gshard._util.events import now

OLD = ".1"  # appended to the name of the file that a new one follows


class LogFile:
    """A file to which each start of a job appends.

    A file that would become larger than `limit` bytes is renamed first, in place of the one that
    was renamed before, and a new one begins; a line is never split between the two.

    Raises:
      OSError: it cannot be written.
    """

    def __init__(self, path: Path, limit: int):
        self.path: Path = path
        self._limit, self._locks = limit, False
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self.path).st_mode):
                raise OSError(0, "it is not a regular file")
        # A pipe would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        number = os.open(self.path, flags, 0o600)
        try:
            os.fchmod(number, 0o600)
        except OSError:
            os.close(number)
            raise
        self._file = os.fdopen(number, "ab")
        if self._locks:
            self.lock()

    def _size(self) -> int:
        """Returns the size, after opening the file again if it was moved or deleted meanwhile."""
        about = os.fstat(self._file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), about):
                return about.st_size
        self._file.close()
        self._open()
        return os.fstat(self._file.fileno()).st_size

    def write(self, raw: bytes) -> None:
        """Appends bytes; a full disk ends the file but not the job."""
        if self._file.closed:
            return
        try:
            size = self._size()
            if size and size + len(raw) > self._limit:
                raw = self._begin_next(raw)
            self._file.write(raw)
            self._file.flush()
        except OSError as error:
            print(f"gshard: {self.path} ends here: {error.strerror}", file=sys.stderr, flush=True)
            self.close()

    def _begin_next(self, raw: bytes) -> bytes:
        """Begins the next file; returns what belongs there."""
        head, end, rest = self._parted(raw)
        self._file.write(head + end)
        self._file.close()
        os.replace(self.path, self.path.with_name(self.path.name + OLD))
        self._open()
        return rest

    def _parted(self, raw: bytes) -> tuple[bytes, bytes, bytes]:
        """Parts bytes at the end of the line that has begun."""
        return b"", b"", raw

    def lock(self) -> bool:
        """Locks the file, and those that follow it, until `close`.

        Returns:
          Whether no other program had locked it.
        """
        self._locks = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):  # what did not fit is tried once more, and said above
            self._file.close()


class Log(LogFile):
    """`rank-R.log`: what a process prints, each line with the time at which it began.

    Raises:
      GShardError: it cannot be written.
    """

    def __init__(self, folder: Path, rank: int, limit: int):
        path = folder / f"rank-{rank}.log"
        self._at_start = True  # of a line
        try:
            super().__init__(path, limit)
        except OSError as error:
            raise GShardError(
                f"--log_dir {folder}: {path} cannot be written ({error.strerror}). Name another "
                "folder."
            ) from error
        super().write(f"--- {now()} rank {rank} ---\n".encode())

    def write(self, raw: bytes) -> None:
        """Appends bytes as they were printed, with the time before each line."""
        if not raw:
            return
        stamp = f"{now()} ".encode()
        begins, self._at_start = self._at_start, raw.endswith(b"\n")
        inner = raw[:-1].replace(b"\n", b"\n" + stamp) + raw[-1:]
        self._begins = begins
        super().write(stamp + inner if begins else inner)

    def _parted(self, raw: bytes) -> tuple[bytes, bytes, bytes]:
        return (b"", b"", raw) if self._begins else raw.partition(b"\n")
