"""Whether files can be written where a run writes them, and how fast."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from gshard.cli.doctor.check import GIB, Check, size

_BYTES = 16 * 2**20


def disks() -> list[Check]:
    """The temporary and the current directory."""
    found = []
    asked = {"temporary directory": tempfile.gettempdir, "current directory": os.getcwd}
    for name, ask in asked.items():
        try:
            folder = ask()
        except OSError as error:  # it was removed; or none can be written
            found.append(Check(name, "fail", str(error), "cd to a folder that is there"))
            continue
        found.append(written(name, Path(folder)))
    wanted = os.environ.get("TMPDIR")
    if wanted and os.path.abspath(wanted) != tempfile.gettempdir():
        said = f"{wanted} cannot be used; temporary files go to {tempfile.gettempdir()}"
        found.append(Check("TMPDIR", "warn", said, "name a folder that can be written"))
    return found


def written(name: str, folder: Path, count: int = _BYTES) -> Check:
    """Writes so many bytes into a new file, flushes, renames and reads it, and removes it."""
    mend = f"give {folder} room and leave to write, or run where there is"
    data = os.urandom(2**20) * (count // 2**20)
    try:
        free = shutil.disk_usage(folder).free
        began = time.perf_counter()
        number, first = tempfile.mkstemp(prefix=".gshard-doctor-", dir=folder)
        path = Path(first)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            path = path.rename(f"{first}-renamed")
            same = path.read_bytes() == data
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror}", mend)
    if not same:
        return Check(
            name, "fail", f"{folder}: what is read is not what was written", "use another disk"
        )
    said = f"{folder}: {count / 1e6 / seconds:,.0f} MB/s written, {size(free)} free"
    if free < GIB:
        return Check(name, "warn", said, "less than 1 GiB: a checkpoint may not fit")
    return Check(name, "ok", said)
