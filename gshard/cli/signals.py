"""Signals that Python drops: an exception in a finalizer ends nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading


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
