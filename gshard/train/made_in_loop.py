"""Warns of steps that a program makes again for each call: each of them is compiled."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from types import CellType
from typing import Any

import jax
from jax import core

from gshard._util.closure import bound_to, opened
from gshard._util.errors import place_of, warn
from gshard.sharding.plan import Plan

_called_once: weakref.WeakKeyDictionary[Plan, Counter[Hashable]] = weakref.WeakKeyDictionary()


def code_of(function: Any) -> tuple[Hashable, ...]:
    """Returns what functions that are made again in a loop have in common.

    That is their code, and the identity of what they read: of what partials have bound, of the
    object of a method, and of the variables of their closure.
    """
    inner = opened(function).function
    cells = [x for x in getattr(inner, "__closure__", None) or () if x != CellType()]
    read = [*bound_to(function), *(x.cell_contents for x in cells)]
    return getattr(inner, "__code__", inner), *map(_identity, read)


def _identity(x: Any) -> Hashable:
    return (type(x), x) if isinstance(x, (str, bytes, int, float, complex)) else id(x)


class MadeInLoop:
    """Counts the calls of a step, to tell whether the program makes a new one for each call.

    Then three of them, for the same loss and with the same options, are called only once each, one
    after the other. Of losses with the same code that read different things, they are sixteen.

    Args:
      plan: of the steps.
      call: the function that makes them.
      function: what the user gave it.
      options: what else makes another step.
    """

    def __init__(self, plan: Plan, call: str, function: Callable[..., Any], options: Hashable):
        self._counts = _called_once.setdefault(plan, Counter())
        code = code_of(function)
        self._limits: dict[Hashable, int] = {(call, code, options): 3, (call, code[0]): 16}
        self._call, self._function, self._calls = call, function, 0

    def count(self, results: Any) -> None:
        """Counts a call of the step by its results; warns at the third step that is made for one.

        Inside a trace of the user's, nothing is compiled for the call.
        """
        if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(results)):
            return
        self._calls += 1
        for key, limit in self._limits.items():
            self._counts[key] = 0 if self._calls > 1 else self._counts[key] + 1
            if self._counts[key] == limit:
                warn(
                    f"{self._call} was called {limit} times with {place_of(self._function)}, and "
                    "each step was compiled for one call. If it is called in the loop, call it "
                    "once, before the loop, with a loss that is defined there."
                )
