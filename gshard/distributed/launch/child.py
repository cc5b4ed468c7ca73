"""What runs in a spawned process: the function, and its result or its error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gshard.distributed.exit import at_exit_with


class Result(NamedTuple):
    """What the function returned; arrays of JAX as NumPy's."""

    value: Any


class Failure(NamedTuple):
    """What the function raised: its traceback, and the exception itself if it can be pickled."""

    text: str
    error: bytes | None


def run(func: Callable[..., Any], args: tuple[Any, ...], to: Connection, err: Connection) -> None:
    """Runs `func(*args)` and sends its result; `err` gets what is written to stderr."""
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
        else:
            _send(to, None, func)
        raise
    except BaseException as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame above
        text = "".join(traceback.format_exception(error.with_traceback(own)))
        to.send(Failure(text, _packed(error)))
        at_exit_with(1)
        sys.exit(1)
    finally:
        to.close()


def _packed(error: BaseException) -> bytes | None:
    """Pickles an exception; some cannot be pickled, or not restored."""
    try:
        return bytes(ForkingPickler.dumps(error))
    except Exception:
        return None


def on_host(value: Any) -> Any:
    """Returns a tree with NumPy arrays in place of JAX's, except for typed random keys.

    Not by `jax.tree.map`, which sorts the keys of dictionaries.
    """
    if isinstance(value, jax.Array):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return value if is_key or isinstance(value, core.Tracer) else np.asarray(value)
    if isinstance(value, tuple) and (make := getattr(value, "_make", None)) is not None:
        return make(map(on_host, value))
    if type(value) is dict:
        return {key: on_host(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    with suppress(TypeError, ValueError):  # no tree to JAX: a dictionary with keys of two types
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
            return jax.tree.map(on_host, value)
    return value


def _send(to: Connection, value: Any, func: Callable[..., Any]) -> None:
    try:
        to.send(Result(on_host(value)))
    except Exception as error:
        what = getattr(func, "__name__", repr(func))
        raise TypeError(
            f"the result of {what} cannot be sent to the process that called spawn: {error}"
        ) from error
