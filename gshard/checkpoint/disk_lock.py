"""The lock of a checkpoint directory: one process at a time writes into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from gshard._util.errors import GShardError, warn
from gshard._util.open_files import closed_in_forks
from gshard.checkpoint.step_files import InUseError

LOCK = ".gshard_lock"


def lock(directory: Path) -> int:
    """Makes this process the only writer, until it unlocks the returned descriptor or ends."""
    path = directory / LOCK
    refused = GShardError(
        f"{path} is a link or not a regular file, and gshard would overwrite what it leads to. "
        "Remove it."
    )
    # Writing into a pipe would wait for a reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise refused from error
        raise
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        if stat.S_ISREG(about.st_mode):
            raise GShardError(
                f"{path} has a second hard link, as `cp -al` and some backups create, and gshard "
                f"would change that copy too. Remove {path}: gshard makes a new one."
            )
        raise refused
    closed_in_forks.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.read(descriptor, 200).decode(errors="replace").strip()
        unlock(descriptor)
        raise InUseError(
            f"{directory}: {who or 'another process'} writes its checkpoints there. Choose another "
            "directory, or end that one (in this process: checkpointer.close())."
        ) from error
    except OSError as error:  # such as NFS without its lock service
        warn(
            f"{directory} is on a file system without locks ({error.strerror}), so a second job "
            "that saves there is not refused. Give each job a directory of its own, and mount NFS "
            "with locks (version 4, without nolock)."
        )
        return descriptor
    with contextlib.suppress(OSError):  # such as a full disk: only messages need it
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return descriptor


def unlock(descriptor: int) -> None:
    """Lets another process write; does nothing in a forked child, which has not the lock."""
    if descriptor in closed_in_forks:
        closed_in_forks.discard(descriptor)
        with contextlib.suppress(OSError):  # also if a child that a C library forked still has it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_locked_by(descriptor: int, directory: Path) -> bool:
    """Whether a descriptor of `lock` belongs to this directory, which may have been replaced."""
    try:
        own = descriptor in closed_in_forks
        return own and os.path.samestat(os.fstat(descriptor), (directory / LOCK).stat())
    except OSError:
        return False
