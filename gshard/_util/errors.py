"""What gshard raises and warns, and how it suggests what was meant.

Every message says what is wrong (with the value), where (path or argument) and how to mend it.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax

_LIBRARIES = str(Path(__file__).parents[1]), str(Path(jax.__file__).parent)


class GShardError(ValueError):
    """Input that a user can mend."""


class DonatedStateError(GShardError, RuntimeError):
    """A train state whose memory an earlier step has taken over."""


class ArgumentTypeError(GShardError, TypeError):
    """An argument of a type that cannot be meant."""


class UnevenInputsError(GShardError, RuntimeError):
    """Some devices ran out of data before others."""


class MissingAttributeError(GShardError, AttributeError):
    """An attribute that Paddle or PyTorch has and gshard has not."""


class CallOrderError(GShardError, RuntimeError):
    """A call that has no place here: before another one, or twice."""


class NonFiniteError(GShardError, FloatingPointError):
    """Too many steps in a row whose gradient was not finite."""


class GShardWarning(UserWarning):
    """Something that works, but probably not as meant."""


def warn(message: str) -> None:
    """Warns at the line of the user's code that called into gshard, through JAX or not."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GShardWarning, stacklevel=level)


def did_you_mean(value: object, known: Iterable[object]) -> str:
    """A sentence that names the nearest of `known`, or nothing when none is near."""
    found = difflib.get_close_matches(str(value), [str(k) for k in known], n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def some(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 4 more`: a list that stays readable."""
    items = [str(item) for item in items]
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
