"""Which lines of a traceback are the user's own, and tracebacks of those alone."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from gshard._util.errors import GShardError, without_partial

P = ParamSpec("P")
R = TypeVar("R")
_GSHARD = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_PYTHON = sysconfig.get_path("stdlib")


def is_library(file: str) -> bool:
    """Whether a source file is not the user's own."""
    return file.startswith(_GSHARD) or any(name in file for name in _PACKAGES)


def line_of_error(error: BaseException) -> str:
    """The file and line outside of libraries that an error was raised from; empty if unknown."""
    own = [x for x in traceback.extract_tb(error.__traceback__) if _is_own(x.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def at_line(error: BaseException) -> str:
    """` at file:line`, of `line_of_error`; empty if unknown."""
    line = line_of_error(error)
    return f" at {line}" if line else ""


def named_as(user: Any, function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which calls `user`, so that JAX's errors name `user`."""
    user = without_partial(user)
    if not hasattr(inspect.unwrap(user), "__code__"):  # an object that can be called
        user = type(user).__call__
    return functools.update_wrapper(function, user, (), ())


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function or generator function: what it raises goes through `shorten`."""

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

    Of another error than a `GShardError` those stay that lie below the user's last function, such
    as a loss: they say where it comes from. All stay with `JAX_TRACEBACK_FILTERING=off`, which
    also shows the frames that JAX removes.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_traceback_filtering == "off":
        return
    for at in chain_of(error):
        entries = _entries(at.__traceback__)
        ours = [_is_ours(x.tb_frame) for x in entries]
        users = [i for i, x in enumerate(entries) if _is_own(x.tb_frame.f_code.co_filename)]
        last = len(entries) if isinstance(at, GShardError) else max(users, default=0)
        if True in ours[:last]:
            at.with_traceback(_made([x for i, x in enumerate(entries) if i > last or not ours[i]]))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that led to it, as a traceback shows them."""
    seen, at = set[int](), error
    while at is not None and id(at) not in seen:
        yield at
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _is_own(file: str) -> bool:
    return not is_library(file) and not file.startswith((_PYTHON, "<"))


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    generated = file.startswith("<") and frame.f_globals.get("__name__", "").startswith("gshard.")
    return generated or file.startswith(_GSHARD)


def _entries(at: TracebackType | None) -> list[TracebackType]:
    found = []
    while at is not None:
        found.append(at)
        at = at.tb_next
    return found


def _made(entries: list[TracebackType]) -> TracebackType | None:
    made = None
    for x in reversed(entries):
        made = TracebackType(made, x.tb_frame, x.tb_lasti, x.tb_lineno)
    return made
