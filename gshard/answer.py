"""What a command says: its exit code, and its text on stdout, which may be closed, or full."""

from __future__ import annotations

import contextlib
import os
import sys

# Exit codes of all commands but `gshard launch`, whose are its script's.
YES = 0
NO = 1  # the answer: it does not fit, a promise is broken, a checkpoint is damaged, a check fails
NO_ANSWER = 2  # the question is wrong (as argparse says it), or something to answer it is missing


def print_answer(text: str) -> bool:
    """Prints a text; False where nobody reads it, and with a line on stderr where it cannot be.

    A reader such as `head` has had enough, so that is no error of anybody's.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _write_no_more()
        return False
    except OSError as error:
        _write_no_more()
        print(f"error: stdout cannot be written: {error.strerror or error}.", file=sys.stderr)
        return False
    return True


def _write_no_more() -> None:
    """Python flushes stdout when it exits, which would fail again (`SIGPIPE` in its manual)."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
