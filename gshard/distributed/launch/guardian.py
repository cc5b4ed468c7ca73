"""A small process that ends the processes of a job when their parent is gone.

The parent may be killed by a signal that nothing can catch. So it keeps a pipe to this program open
and names the process groups that it has started. When the pipe closes, this program kills all that
is left of them, including processes that are stopped or hang in C++, and their own children.

It starts as a script, without site packages, in some 20 ms; it imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress

_END = "end"
_pipes: weakref.WeakSet = weakref.WeakSet()


def _close_in_fork() -> None:
    for pipe in _pipes:
        pipe.close()


os.register_at_fork(after_in_child=_close_in_fork)


class Guardian:
    """The parent's end of the pipe."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self._pipe = os.fdopen(write, "wb", buffering=0)
        _pipes.add(self._pipe)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C of a terminal is not for it
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(read)

    def watch(self, pid: int) -> None:
        """Adds a process, and the group it may lead, that must not outlive this one."""
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Removes a process that has ended, since its id may be used again."""
        self._say(f"-{pid}")

    def close(self) -> None:
        """Kills whatever is still watched."""
        self._say(_END)  # a fork of this program may hold the pipe open
        self._pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError, ValueError):  # somebody ended it: only the care is lost
            self._pipe.write(f"{line}\n".encode())


def kill_group(pid: int) -> None:
    """Kills a process that has not been waited for, and the group it leads."""
    kill_rest(pid)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_rest(pid: int) -> None:
    """Kills the rest of the group of an ended process, whose id may belong to another one now."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _watch_over() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent may still need it
    watched: set[int] = set()
    for line in sys.stdin:
        if line.rstrip() == _END:
            break
        (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    for pid in watched:
        kill_group(pid)


if __name__ == "__main__":
    _watch_over()
