"""A row of the table: what is done wrongly, and what a user sees.

`refused(function, *words)`: a `GShardError` that contains the words. `warned`: it runs with a
warning of gshard that contains them. `right`: it works; the function returns what came out and what
one device gives, and both are equal. `raw`: an error of JAX, Flax or Python, about something that
gshard does not know better.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import gshard

Misuse = Callable[..., Any]


class Row(NamedTuple):
    """A misuse, a function of an empty folder or of a rank, and what a user sees."""

    misuse: Misuse
    seen: str
    words: tuple[str, ...] = ()
    error: type[Exception] = gshard.GShardError


def refused(
    misuse: Misuse, *words: str, error: type[gshard.GShardError] = gshard.GShardError
) -> Row:
    """A clear error."""
    return Row(misuse, "refused", words, error)


def warned(misuse: Misuse, *words: str) -> Row:
    """A clear warning."""
    return Row(misuse, "warned", words)


def right(misuse: Misuse) -> Row:
    """It works."""
    return Row(misuse, "right")


def raw(misuse: Misuse, error: type[Exception], *words: str) -> Row:
    """An error that is not gshard's."""
    return Row(misuse, "raw", words, error)


def seen_by(call: Callable[[], Any]) -> str:
    """What a process of several sees of a call, as a text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            out = call()
        except gshard.GShardError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"raw: {type(error).__name__}: {error}"
    if said := said_in(found):
        return f"warned: {said}"
    try:
        assert_equal(*out)
    except Exception as error:
        return f"wrong: {error} {out}"
    return "right"


def said_in(found: list[warnings.WarningMessage]) -> str:
    """The warnings of gshard; the models are small, so that some parameters are replicated."""
    said = [str(w.message) for w in found if issubclass(w.category, gshard.GShardWarning)]
    return "\n".join(text for text in said if "% of the parameters" not in text)


def check(row: Row, folder: Path) -> None:
    """Does what a row says is done wrongly, and compares what is seen."""
    if row.seen in ("refused", "raw"):
        with pytest.raises(row.error) as caught:
            row.misuse(folder)
        assert_words(row.words, str(caught.value))
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = row.misuse(folder)
    said = said_in(found)
    if row.seen == "warned":
        return assert_words(row.words, said)
    assert not said
    assert isinstance(out, tuple) and len(out) == 2, "return what came out, and what is right"
    assert_equal(*out)


def assert_words(words: tuple[str, ...], text: str) -> None:
    assert words
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


def assert_equal(found: Any, wanted: Any) -> None:
    """Two trees of numbers have equal leaves, whatever contains them."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)
