"""Errors and warnings of gshard, and helpers for their messages.

Every message says what is wrong (with the value), where (path or argument) and how to fix it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_JAX = find_spec("jax")  # without importing it, which takes a second
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(_JAX.submodule_search_locations or () if _JAX is not None else ()),
)


class GShardError(ValueError):
    """Raised for input that the caller can correct; the base class of gshard's errors.

    The message says what is wrong, where (the argument or the path of a leaf) and how to fix it. A
    subclass may also derive from the built-in error that Python code would expect.
    """

    __module__ = "gshard"  # so that tracebacks name it as users import it

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the constructor: that of a subclass may take more than the message.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class DonatedStateError(GShardError, RuntimeError):
    """Raised for a train state that was donated to an earlier step: use the one it returned."""

    __module__ = "gshard"


class ArgumentTypeError(GShardError, TypeError):
    """Raised for an argument of the wrong type; the message says what to pass."""

    __module__ = "gshard"


class UnevenInputsError(GShardError, RuntimeError):
    """Raised when some processes run out of data before others.

    Give every process the same number of batches, or use `gshard.pytorch.Join`.
    """

    __module__ = "gshard"


class MissingAttributeError(GShardError, AttributeError):
    """Raised for an attribute that an object lacks; says what to use instead.

    It is one of Paddle or PyTorch that gshard does not have, or one that a copy does not have.
    """


class MissingNameError(GShardError, ImportError):
    """Raised for the import of a PyTorch or Paddle name that a gshard module does not have."""


class CallOrderError(GShardError, RuntimeError):
    """Raised for a call at the wrong time: before a call that it needs, or a second time."""

    __module__ = "gshard"


class OutsideError(GShardError):
    """Raised for what comes from outside the program, so that a later try may succeed."""

    is_outside = True


def is_outside(error: BaseException | None) -> bool:
    """Whether an error comes from outside the program: from a disk, storage or another machine."""
    return getattr(error, "is_outside", isinstance(error, OSError))


class NonFiniteError(GShardError, FloatingPointError):
    """Raised after too many steps in a row with non-finite gradients; names the first such step.

    Lower the learning rate, clip the gradients, or look for the cause in the loss.
    """

    __module__ = "gshard"


class GShardWarning(UserWarning):
    """Warns of something that works, but probably not as intended; says what to change."""

    __module__ = "gshard"


def warn(message: str) -> None:
    """Warns at the line of the user's code that called gshard, directly or through JAX."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and is_library_frame(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GShardWarning, stacklevel=level)


def is_library_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of gshard or JAX."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def without_partial(function: Any) -> Any:
    """The function that a `functools.partial` calls in the end, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def place_of(function: object) -> str:
    """A function's name, with its file and line where it has one."""
    function = without_partial(function)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def did_you_mean(value: object, known: Iterable[object], cutoff: float = 0.5) -> str:
    """A sentence that suggests the most similar of `known`; empty when none is similar."""
    found = difflib.get_close_matches(str(value), [str(k) for k in known], n=1, cutoff=cutoff)
    return f" Did you mean {found[0]!r}?" if found else ""


def similar_option(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the most similar of `known` options of a command line."""
    # The dashes alone are similar; and at 0.5 `--layers` would be similar to `--paper`.
    names = [option[2:] for option in known if option.startswith("--")]
    return did_you_mean(name.lstrip("-"), names, cutoff=0.7).replace(" '", " '--")


def refuse_names(module: str, instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module; `instead` says what to use for names it lacks."""

    def look_up(name: str) -> NoReturn:
        if name not in instead:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise missing_name(module, name, instead[name], sys._getframe(1))

    return look_up


def missing_name(module: str, name: str, hint: str, asked: FrameType) -> Exception:
    """The error for a name that a module lacks, asked for by this frame."""
    # `from module import name` hides the text of an AttributeError, and hasattr needs one.
    imports = asked.f_globals.get("__name__") == "importlib._bootstrap"
    error = MissingNameError if imports else MissingAttributeError
    return error(f"{module} has no {name}. {hint}")


def some(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 4 more`: at most `most` items as text."""
    items = [str(item) for item in items]
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
