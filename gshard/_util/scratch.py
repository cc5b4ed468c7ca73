"""Folders for files that a process needs for a while, which no kill leaves behind for long.

They are in `gshard-UID` of the folder for temporary files (`TMPDIR`). Each process has one there,
and holds a lock on it. The next process of this machine removes those that nobody holds any more.
Machines that share the folder for temporary files may not see each other's locks.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from gshard._util.cgroup import contents
from gshard._util.errors import GShardError
from gshard._util.open_files import closed_in_forks

_LOCK = "lock"


def scratch_folder(prefix: str) -> Path:
    """Makes an empty folder; whoever asked for it removes it."""
    if not _own_folder(os.getpid()).exists():  # somebody has cleaned the folder for temporary files
        _own_folder.cache_clear()
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=_own_folder(os.getpid())))


@functools.cache
def _own_folder(process: int) -> Path:
    """The folder of this process; a forked child gets another one."""
    root = Path(tempfile.gettempdir()) / f"gshard-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    about = root.lstat()
    if root.is_symlink() or about.st_uid != os.getuid():
        raise GShardError(f"{root} belongs to somebody else. Set TMPDIR to a folder of your own.")
    for folder in root.iterdir():
        if _is_of_this_machine(folder.name):
            _remove_if_dead(folder)
    prefix = "-".join((str(process), *_machine(), ""))
    own = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    new = own / "new"  # nobody looks at it before it is locked
    number = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(number, fcntl.LOCK_EX)  # until this process ends
    new.rename(own / _LOCK)
    closed_in_forks.add(number)
    atexit.register(_remove_own, own, process)
    return own


def _machine() -> tuple[str, str]:
    """The boot of this machine, empty if it is not known, and its name."""
    return contents(Path("/proc/sys/kernel/random/boot_id"))[:8], os.uname().nodename


def _is_of_this_machine(name: str) -> bool:
    """Whether a process of this machine made a folder: since the boot, or under the same name."""
    parts = name.rpartition("-")[0].split("-", 2)
    return len(parts) == 3 and any(x and x == y for x, y in zip(parts[1:], _machine(), strict=True))


def _remove_if_dead(folder: Path) -> None:
    """Removes the folder of a process that has ended."""
    with suppress(OSError):  # it is being removed, or made: then it has no lock yet
        number = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(number)


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
