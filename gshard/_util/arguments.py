"""Says in words which arguments a public function takes, where a call does not fit it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from gshard._util.errors import ArgumentTypeError, did_you_mean, some
from gshard._util.tracebacks import short_traceback

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_HIDDEN = ("self", "cls")
# As `inspect.Signature.bind` says it, and as Python says it of a call.
_LACKING = re.compile(r"missing (?:a|\d+) required (?:\S+ )?arguments?: '(\w+)'")


def named_arguments(
    instead: Mapping[str, str] | None = None, name: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that explains a call which does not fit the function.

    Python's own error only names the argument. People who come from another library have its names
    in their fingers.

    Args:
      instead: what to write for an argument of another library, by its name there; or what to pass
        for one of the function's own that is missing, or as `"*"` for more than it takes.
      name: of the function in the error; by default its own, or that of the class it constructs.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        *_, owner, last = ["", *function.__qualname__.split(".")]
        called = name or (owner if last in ("__init__", "__new__") else last)
        kinds = {x.kind for x in signature.parameters.values()}
        takes = [x for x in signature.parameters if x not in _HIDDEN]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as raised:
                try:  # only now: a call that fits pays nothing
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    said = str(error)
                else:
                    # Python 3.13 binds the name of a positional argument to `**kwargs`.
                    if raised.__traceback__ is None or raised.__traceback__.tb_next is not None:
                        raise
                    said = str(raised).partition("() ")[2] or str(raised)
            raise ArgumentTypeError(explained(said, kwargs))

        def explained(error: str, given: Mapping[str, Any]) -> str:
            known = instead or {}
            unknown = next((x for x in given if x not in takes), None)
            if unknown is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
                lacks = f"{called} has no argument {unknown}=."
                if unknown not in known and (others := _public_with(unknown)):
                    return f"{lacks} That is an argument of {' and '.join(others)}."
                hint = f" {known[unknown]}" if unknown in known else did_you_mean(unknown, takes)
                return f"{lacks}{hint} It takes {some(takes, 9)}."
            if re.search("too many positional|positional.only", error) and "*" in known:
                return f"{called}: {error}. {known['*']}"
            lacking = _LACKING.search(error)
            if lacking is not None and lacking[1] in known:
                return f"{called} needs the argument {lacking[1]}=. {known[lacking[1]]}"
            return f"{called}: {error}. It takes {some(takes, 9)}."

        checked.explains_arguments = True  # pyright: ignore[reportAttributeAccessIssue]
        return short_traceback(checked)

    return decorate


def _public_with(argument: str) -> list[str]:
    """The decorated functions and classes in gshard's root that take an argument.

    They are looked up by name: a module that was never used is not imported yet.
    """
    root = sys.modules[__name__.partition(".")[0]]
    decorated = {}
    for name in root.__all__:
        with suppress(ImportError):
            x = getattr(root, name)
            if hasattr(x.__init__ if isinstance(x, type) else x, "explains_arguments"):
                decorated[name] = x
    return [x for x in decorated if argument in inspect.signature(decorated[x]).parameters]


def named_fields(instead: Mapping[str, str]) -> Callable[[C], C]:
    """Returns a decorator of a dataclass: `named_arguments` for its fields."""

    def decorate(cls: C) -> C:
        cls.__init__ = named_arguments(instead, cls.__name__)(cls.__init__)
        return cls

    return decorate
