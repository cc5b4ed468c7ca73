"""What a command says: its exit code, and its text on stdout, which may be closed, or full."""

from __future__ import annotations

import contextlib
import os
import sys

# Exit codes of all commands but `gshard launch`, whose are its script's.
YES = 0
NO = 1  # the answer: it does not fit, a promise is broken, a checkpoint is damaged, a check fails
NO_ANSWER = 2  # the question is wrong (as argparse says it), or something to answer it is missing


def print_answer(text: str, code: int) -> int:
    """Prints an answer and returns its exit code; `NO_ANSWER` where it cannot be written.

    A reader such as `head` may have had enough before the end: what it did not read is no less
    true, and the code stays.
    """
    error = print_text(text)
    return code if error is None or isinstance(error, BrokenPipeError) else NO_ANSWER


def print_text(text: str) -> OSError | None:
    """Prints a text; what kept it from being written, after a line on stderr where one is due."""
    try:
        print(text, flush=True)
    except OSError as error:
        _write_no_more()
        if not isinstance(error, BrokenPipeError):
            why = error.strerror or error
            print(f"error: stdout cannot be written: {why}.", file=sys.stderr)
        return error
    return None


def _write_no_more() -> None:
    """Python flushes stdout when it exits, which would fail again (`SIGPIPE` in its manual)."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
