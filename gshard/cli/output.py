"""What a command prints, to readers that may have left and disks that may be full."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any

# Exit codes of all commands but `gshard launch`, whose are its script's.
YES = 0
NO = 1  # the answer: it does not fit, a budget is exceeded, a checkpoint is damaged, a check fails
NO_ANSWER = 2  # the question is wrong (as argparse says it), or something to answer it is missing


def print_in_any_encoding() -> None:
    """Has stdout replace characters that its encoding lacks, such as the lines of tables."""

    def others(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        lacking = error.object[error.start : error.end]
        return "".join("-" if x == "─" else "?" for x in lacking), error.end

    codecs.register_error("gshard", others)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may be closed
        sys.stdout.reconfigure(errors="gshard")


def tell(text: str) -> None:
    """Prints a line on stderr, which may be the same closed pipe as stdout; that is no error."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def print_text(text: str, code: int, unread: int | None = None) -> int:
    """Prints a text and returns the exit code, which is `NO_ANSWER` if it cannot be written.

    A reader such as `head` may close the pipe before the end: that gives `unread`, or else `code`.
    """
    try:
        print(text, flush=True)
        return code
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return code if unread is None else unread
        tell(f"error: stdout cannot be written: {error.strerror or error}.")
        return NO_ANSWER


def _discard(stream: Any) -> None:
    with contextlib.suppress(OSError):  # Python flushes it again at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
