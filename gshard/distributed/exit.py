"""Ends a failed process immediately, without waiting for the others.

At exit JAX waits up to minutes for all other processes, which wait in a collective for this one;
then C++ ends them. So a failed process ends itself before JAX's exit functions run: its sockets
close, and the others notice. `atexit` functions that were registered after gshard was imported run
first; earlier ones, like JAX's, do not run.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from traceback import extract_tb
from types import TracebackType

import jax  # noqa: F401  its exit function, registered by this import, must run after the one here

# The exit code of a process that was told to stop and did so in order: EX_TEMPFAIL of sysexits.h,
# "try again later".
PREEMPTED_EXIT_CODE = 75

# What a collective or JAX's coordinator says when another process has gone. No more than that: the
# words are looked for in what the user's program prints, too.
LOST_PEER = re.compile(
    r"gloo [\w ]{1,40} failed|coordination service|distributed service detected|"
    r"remote process exited|nccl(remote|system)error|lost its connection to another one",
    re.IGNORECASE,
)

_THREADS = 8.0  # seconds that `atexit` functions and other threads have to end

_code = 0


def at_exit_with(code: int) -> None:
    """Makes this process exit with `code`, when it ends, without waiting for others.

    Threads that still run do not delay the exit: the other processes would wait for them too.
    """
    global _code
    _code = code & 0xFF or 1  # what the system keeps of a code; 0 would be a success
    late = threading.Timer(_THREADS, _exit_now)
    late.daemon = True
    late.start()


@atexit.register
def _exit_now() -> None:
    if _code:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                pass
        os._exit(_code)


def exit_when_it_fails() -> None:
    """Makes an uncaught exception end this process immediately from now on."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        at_exit_with(130 if issubclass(kind, KeyboardInterrupt) else 1)
        if LOST_PEER.search(str(error)):
            _say_lost(error, traceback)
        else:
            before(kind, error, traceback)

    sys.excepthook = hook


def _say_lost(error: BaseException, traceback: TracebackType | None) -> None:
    """Prints one paragraph about a lost process, since the frames of JAX do not explain it."""
    at = [frame for frame in extract_tb(traceback) if "site-packages" not in frame.filename]
    where = f" in {at[-1].filename}, line {at[-1].lineno}" if at else ""
    print(
        f"gshard: this process lost its connection to another one{where}: "
        f"{str(error).splitlines()[0]}. The other has probably ended; the reason is in the log of "
        "the process that ended first.",
        file=sys.stderr,
        flush=True,
    )
