"""What all commands of this folder do around their work: errors and warnings as lines, progress."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
from rich.console import Console

from gshard._util.errors import GShardError, GShardWarning
from gshard.analysis.config import Config
from gshard.cli.common import NO_ANSWER, print_answer

Asked = TypeVar("Asked", Config, Config | None)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Stopped(SystemExit):
    """A signal asks this program to end; its code is what a shell says of it."""


def leave_accelerators() -> None:
    """Keeps JAX to the CPU: nothing runs, and a job of somebody's may hold the accelerators.

    Where JAX has started it stays as it is.
    """
    jax.config.update("jax_platforms", "cpu")


def in_words(
    read: Callable[[], tuple[Any, Asked]], work: Callable[[Any, Asked], tuple[str, int]]
) -> int:
    """Does the work of a command; an error of the user's is one line, and so is each warning, once.

    Args:
      read: gives the parsed words and the config. It may exit, as argparse does.
      work: takes both, and gives what to print and the exit code. What else is printed meanwhile,
        such as by the model, goes to stderr.

    Returns:
      The exit code (see `gshard.answer`); 130 after Ctrl-C, and 128 and its number after a signal
      that ends a program: then too whatever the work has opened is closed.
    """
    with _stopped_by_signals(), _warnings_as_lines():
        try:
            asked = read()
            with contextlib.redirect_stdout(sys.stderr):
                text, code = _worked(work, asked)
            return print_answer(text, code)
        except GShardError as error:
            print(f"error: {error}", file=sys.stderr)
            return NO_ANSWER
        except Exception as error:  # of the model's own, and where: Python would exit as for a no
            sys.excepthook(type(error), error, error.__traceback__)
            return NO_ANSWER
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except _Stopped as stopped:
            return int(str(stopped))


def _worked(
    work: Callable[[Any, Asked], tuple[str, int]], asked: tuple[Any, Asked]
) -> tuple[str, int]:
    try:
        return work(*asked)
    except _Stopped:
        raise
    except SystemExit as ended:
        raise GShardError(
            f"the model ends the program: SystemExit({ended.code!r}). Raise an error that says why."
        ) from ended


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], Any]]:
    """Shows on a terminal's stderr what is being done; gives a function that says what next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as shown:
        yield shown.update


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turns signals that end the program into an exception, so that nothing is left behind.

    Not those that something else hears or ignores (`nohup`), nor outside the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(128 + number)

    main = threading.current_thread() is threading.main_thread()
    heard = [x for x in _SIGNALS if main and signal.getsignal(x) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Gathers gshard's warnings and prints each once; those of others show as ever."""
    # Several levels are looked at, and say the same.
    said: dict[str, None] = {}
    with warnings.catch_warnings():
        show = warnings.showwarning

        def gather(message: Warning | str, category: type[Warning], *more: Any) -> None:
            if issubclass(category, GShardWarning):
                said[re.sub(r" at level '\w+'", "", str(message))] = None
            else:
                show(message, category, *more)

        warnings.showwarning = gather
        warnings.simplefilter("always", GShardWarning)
        try:
            yield
        finally:
            for text in said:
                print(f"warning: {text}", file=sys.stderr)
