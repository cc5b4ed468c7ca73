"""Which lines of a traceback are the user's own, and tracebacks of those alone."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from gshard._util.errors import GShardError

P = ParamSpec("P")
R = TypeVar("R")
_GSHARD = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_path("stdlib")


def is_library(file: str) -> bool:
    """Whether a source file is not the user's own."""
    return _GSHARD in file or "site-packages" in file


def line_of_error(error: BaseException) -> str:
    """The file and line outside of libraries that an error was raised from; empty if unknown."""
    own = [x for x in traceback.extract_tb(error.__traceback__) if _is_own(x.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function, or generator: `shorten` has seen what it raises."""

    @functools.wraps(function)
    def generate(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            yield from function(*args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]
        except Exception as error:
            shorten(error)
            raise

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return generate if inspect.isgeneratorfunction(function) else call


def shorten(error: BaseException) -> None:
    """Removes gshard's frames from the traceback of an error, and of those that led to it.

    They stay where they say more than the message: where it is not one of gshard, and was not
    raised by a function of the user, such as a loss. All stay with `JAX_TRACEBACK_FILTERING=off`,
    which shows the frames that JAX removes too.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_traceback_filtering == "off":
        return
    seen, at = set[int](), error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        entries, files = _entries(at.__traceback__)
        ours = [file.startswith(_GSHARD) for file in files]
        below = files[ours.index(True) :] if True in ours else []
        if isinstance(at, GShardError) or any(map(_is_own, below)):
            at.__traceback__ = _chain([x for x, own in zip(entries, ours, strict=True) if not own])
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _is_own(file: str) -> bool:
    return not is_library(file) and not file.startswith((_PYTHON, "<frozen"))


def _entries(at: TracebackType | None) -> tuple[list[TracebackType], list[str]]:
    found = []
    while at is not None:
        found.append(at)
        at = at.tb_next
    return found, [x.tb_frame.f_code.co_filename for x in found]


def _chain(entries: list[TracebackType]) -> TracebackType | None:
    made = None
    for x in reversed(entries):
        made = TracebackType(made, x.tb_frame, x.tb_lasti, x.tb_lineno)
    return made
