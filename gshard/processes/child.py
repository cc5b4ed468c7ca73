"""What runs in a process of `gshard.spawn`: the function, and its result or its error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np

from gshard.processes.leaving import LOST_PEER, at_exit_with


class Result(NamedTuple):
    """What the function returned; arrays of JAX as NumPy's."""

    value: Any


class Failure(NamedTuple):
    """What the function raised.

    Attributes:
      text: the traceback.
      error: the exception, where it can be sent.
      follows: it was raised because another process had gone.
    """

    text: str
    error: BaseException | None
    follows: bool


def run(func: Callable[..., Any], args: tuple[Any, ...], to: Connection, err: Connection) -> None:
    """Runs `func(*args)` and sends what came of it, of any size.

    Args:
      func: of the user.
      args: its arguments.
      to: takes the result.
      err: takes what is written to stderr, also by C++.
    """
    os.setpgid(0, 0)  # a group of its own, to end what it starts itself too
    os.dup2(err.fileno(), 2)
    err.close()
    sys.stderr.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        value = jax.tree.map(_on_host, func(*args))
        _send(to, Result(value), f"the result of {func.__name__}")
    except SystemExit as error:
        if error.code not in (0, None):
            at_exit_with(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame above
        text = "".join(traceback.format_exception(error.with_traceback(own)))
        follows = LOST_PEER.search(str(error)) is not None
        try:
            to.send(Failure(text, error, follows))
        except Exception:  # an exception that cannot be sent
            to.send(Failure(text, None, follows))
        at_exit_with(1)
        sys.exit(1)
    finally:
        to.close()


def _on_host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _send(to: Connection, result: Result, what: str) -> None:
    try:
        to.send(result)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to the process that called spawn") from error
