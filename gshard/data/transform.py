"""The user's function of an example, and the random numbers that it is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import shown


class Transform:
    """`transform(example)`, or `transform(example, rng)` where it has an argument of that name."""

    def __init__(self, function: Callable[..., Any], seed: int):
        if not callable(function):
            raise GShardError(
                f"transform={shown(function)} is not a function. It takes an example and returns "
                "one: transform(example), or transform(example, rng)."
            )
        self._function, self._seed = function, seed
        self._random = _takes_rng(function)

    def __call__(self, example: Any, row: int, epoch: int) -> Any:
        """The example as it is stacked. The function may write into what it is given."""
        example = jax.tree.map(_copied, example)
        if not self._random:
            return self._function(example)
        # Of the row and not of the process that reads it.
        entropy = np.random.SeedSequence(self._seed, spawn_key=(epoch, row))
        return self._function(example, rng=np.random.default_rng(entropy))


def _copied(x: Any) -> Any:
    return np.array(x) if isinstance(x, np.ndarray) else x


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether the function is given `rng`.

    Raises:
      GShardError: it has a second argument of another name, which nobody would give.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False  # the user gave it
    needed = [
        name
        for name, p in found.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if more := [name for name in needed[1:] if name != "rng"]:
        raise GShardError(
            f"transform has an argument {more[0]!r} that it is not given: it is called as "
            "transform(example), or as transform(example, rng=...) where it has an argument rng. "
            "Name it rng, or give it a value (functools.partial)."
        )
    return "rng" in found
