"""The log of one process of a job."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

from gshard._util.errors import GShardError


class Log:
    """A file that its owner alone may read; each start of the process goes on at its end.

    Raises:
      GShardError: it cannot be written.
    """

    def __init__(self, folder: Path, rank: int):
        self._path = folder / f"rank-{rank}.log"
        # A pipe would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = os.open(self._path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(number).st_mode):
                os.close(number)
                raise OSError(0, "it is no ordinary file")
            os.fchmod(number, 0o600)
        except OSError as error:
            raise GShardError(
                f"--log_dir {folder}: {self._path} cannot be written ({error.strerror}). Name "
                "another folder."
            ) from error
        self._file = os.fdopen(number, "ab")
        self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} ---\n".encode())

    def write(self, raw: bytes) -> None:
        """Adds bytes; a full disk ends the log, and not the job."""
        if self._file.closed:
            return
        try:
            self._file.write(raw)
            self._file.flush()
        except OSError as error:
            print(f"gshard: {self._path} ends here: {error.strerror}", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        """Ends the log."""
        try:
            self._file.close()
        except OSError:  # what did not fit is tried once more, and said above
            pass
