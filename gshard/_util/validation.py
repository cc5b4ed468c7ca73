"""Checks of arguments, shared by many functions."""

from __future__ import annotations

import inspect
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from gshard._util.errors import GShardError, did_you_mean, place_of, some, warn


def shown(value: Any) -> str:
    """A value as text for a message: shortened if it is plain, else the name of its type."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = 60
    items = value.values() if isinstance(value, dict) else value
    plain = isinstance(value, _PLAIN) or (
        isinstance(value, (tuple, list, dict)) and all(isinstance(x, _PLAIN) for x in items)
    )
    return short.repr(value) if plain else f"a {type(value).__name__}"


_PLAIN = (str, int, float, type(None))
MOST = 10**9  # examples and so on: a larger number is surely a mistake
MOST_DEVICES = 10**6  # a plan lists each of them


def check_integer(
    name: str, value: Any, least: int, meaning: str = "", most: int | None = None
) -> int:
    """An integer argument from `least` to `most` as an `int`: Python's or NumPy's, but not a bool.

    `meaning` is for the message, such as " of devices".
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise GShardError(
            f"{name}={shown(value)} must be a whole number{meaning}, {least} or more."
        )
    if most is not None and number > most:
        raise GShardError(f"{name}={shown(value)} is too large: {most:,} at most.")
    return number


def check_integer_field(
    of: Any, name: str, least: int, meaning: str = "", most: int | None = None
) -> None:
    """As `check_integer`, for a field of a frozen dataclass, which then is an `int`."""
    number = check_integer(name, getattr(of, name), least, meaning, most)
    object.__setattr__(of, name, number)


def with_known_spelling(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """Words of a command line, with `--log-dir` and `--log_dir` as the one that is known."""
    spellings = {name.replace("-", "_"): name for name in known if name.startswith("--")}
    options = [word.partition("=") for word in words]
    return [spellings.get(x.replace("-", "_"), x) + equals + value for x, equals, value in options]


def flag(name: str, value: Any) -> bool:
    """A boolean argument, Python's or NumPy's, as a `bool`."""
    if not isinstance(value, (bool, np.bool_)):
        raise GShardError(f"{name}={shown(value)} must be True or False.")
    return bool(value)


def check_takes(fun: Callable[..., Any], advice: str, *args: Any, **named: Any) -> None:
    """Refuses a function that cannot be called with these arguments, as far as it says so."""
    try:
        inspect.signature(fun).bind(*args, **named)
    except TypeError as error:
        raise GShardError(f"{place_of(fun)}: {error}. {advice}") from error
    except ValueError:  # it has no signature
        pass


def dimension(value: Any, rank: int) -> int | None:
    """A dimension of an array of that rank, counted from 0; None for an invalid one."""
    try:
        dim = operator.index(value)
    except TypeError:
        return None
    return dim % rank if not isinstance(value, bool) and -rank <= dim < rank else None


def pattern(value: Any, where: str) -> re.Pattern[str]:
    """Compiles a regular expression of the argument `where`, which is matched with paths."""
    if not isinstance(value, str):
        raise GShardError(
            f"{where} pattern {shown(value)} must be a regular expression as a string, such as "
            "'^Dense_1/'; flags are a part of it, as in '(?i)dense'."
        )
    try:
        return re.compile(value)
    except re.error as error:
        raise GShardError(
            f"{where} pattern {shown(value)} is not a regular expression: {error}."
        ) from error


def warn_of_cut_numbers(
    argument: str, texts: Iterable[str], paths: Iterable[str], in_order: bool = False
) -> None:
    """Warns of path patterns that end in a number, such as `Dense_1`, which matches `Dense_10` too.

    Paths that another pattern matches as well are left out; with `in_order`, an earlier one.
    """
    given = {text: pattern(text, argument) for text in texts}
    if not any(text[-1:].isdigit() for text in given):
        return
    every = sorted({*paths})

    def after(text: str, path: str) -> set[str]:
        """What follows the matches in a path; a digit where a number is cut."""
        return {path[x.end() : x.end() + 1] for x in given[text].finditer(path)}

    def is_cut(text: str, path: str) -> bool:
        ends = after(text, path)
        return text[-1:].isdigit() and bool(ends) and all(x.isdigit() for x in ends)

    for i, text in enumerate(given):
        others = [x for x in [*given][: i if in_order else None] if x != text]
        cut = [path for path in every if is_cut(text, path)]
        cut = [p for p in cut if not any(after(x, p) and not is_cut(x, p) for x in others)]
        if not cut:
            continue
        ends = {*cut}
        cut = [p for p in cut if ends.isdisjoint(_ends_of(p))]  # without moments of the others
        wanted = [path for path in every if after(text, path) and not is_cut(text, path)]
        text_or_group = f"(?:{text})" if "|" in text else text
        is_name = text == text_or_group and all(after(text, path) == {"/"} for path in wanted)
        this = f"{text}/" if wanted and is_name else f"{text_or_group}(?![0-9])"
        warn(
            f"{argument}: the pattern {text!r}{' also' if wanted else ''} matches {some(cut)}, "
            f"where a longer number begins with the same digits. Write {this!r} for this number "
            f"alone, or {text + '[0-9]*'!r} if longer ones are meant."
        )


def _ends_of(path: str) -> list[str]:
    """The ends of a path that begin after a slash."""
    return [path[i + 1 :] for i, letter in enumerate(path) if letter == "/"]


def names_of(argument: str, value: Any, what: str = "a name") -> tuple[str, ...]:
    """One name or several names as a tuple; refuses what are not strings."""
    names = (value,)
    if isinstance(value, (Sequence, Set)) and not isinstance(value, str):
        names = tuple(sorted(value) if isinstance(value, Set) else value)
    if not all(isinstance(name, str) for name in names):
        raise GShardError(f"{argument}={shown(value)} must be {what}, or several.")
    return names


def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuses a word that is none of those known."""
    if value not in known:
        words = " or ".join(repr(x) for x in known)
        hint = did_you_mean(value, [x for x in known if x])
        raise GShardError(f"{name}={shown(value)} is unknown: pass {words}.{hint}")
