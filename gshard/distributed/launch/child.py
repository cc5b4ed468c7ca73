"""What runs in a spawned process: the function, and its result or its error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard.distributed.exit import LOST_PEER, at_exit_with


class Result(NamedTuple):
    """What the function returned; arrays of JAX as NumPy's."""

    value: Any


class Failure(NamedTuple):
    """What the function raised.

    Attributes:
      text: the traceback.
      error: the exception, packed, where that can be done.
      follows: it was raised because another process had gone.
    """

    text: str
    error: bytes | None
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
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _send(to, func(*args), func)
    except SystemExit as error:
        if error.code not in (0, None):
            at_exit_with(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame above
        text = "".join(traceback.format_exception(error.with_traceback(own)))
        to.send(Failure(text, _packed(error), LOST_PEER.search(str(error)) is not None))
        at_exit_with(1)
        sys.exit(1)
    finally:
        to.close()


def _packed(error: BaseException) -> bytes | None:
    """Apart from its text, since some exceptions cannot be packed, or not unpacked again."""
    try:
        return bytes(ForkingPickler.dumps(error))
    except Exception:
        return None


def _send(to: Connection, value: Any, func: Callable[..., Any]) -> None:
    try:
        to.send(Result(_on_host(value)))
    except Exception as error:
        what = getattr(func, "__name__", repr(func))
        raise TypeError(
            f"the result of {what} cannot be sent to the process that called spawn: {error}"
        ) from error


def _on_host(value: Any) -> Any:
    def leaf(x: Any) -> Any:
        is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return np.asarray(x) if is_array else x

    try:
        return jax.tree.map(leaf, value)
    except (TypeError, ValueError):  # no tree to JAX, such as a dictionary with keys of two types
        return value
