"""Signals that Python drops: an exception in a finalizer, or in an import, may end nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def send_again(number: int) -> None:
    """Sends this process a signal once more, a moment later."""
    again = threading.Timer(0.02, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def interrupt_again(problem: sys.UnraisableHookArgs) -> None:
    """A `sys.unraisablehook` that sends a Ctrl-C again, such as one in JAX's garbage collection."""
    if isinstance(problem.exc_value, KeyboardInterrupt):
        send_again(signal.SIGINT)
    else:
        sys.__unraisablehook__(problem)


@contextmanager
def exit_at_interrupt(code: int) -> Iterator[None]:
    """Ends the process at a Ctrl-C, of which NumPy's import would make an ImportError."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or the user's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
