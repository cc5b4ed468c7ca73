"""What a function reads from outside its arguments, and what of that has changed."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax import core

from gshard._util.errors import some, warn

_LOAD_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_STORE = ("STORE_GLOBAL", "STORE_DEREF")  # such as a counter of its calls


Getters = dict[str, Callable[[], Any]]


def read_from_outside(function: Any) -> tuple[Getters, Getters]:
    """Returns what a function reads of its closure and globals, and what else, by name.

    That is what `functools.partial` has bound, and attributes of the object of a method.
    """
    bound: dict[str, Any] = {}
    while isinstance(function, partial):
        bound |= {f"argument {i + 1} of a partial": x for i, x in enumerate(function.args)}
        bound |= {f"{name} of a partial": x for name, x in function.keywords.items()}
        function = function.func
    others: Getters = {name: partial(_same, x) for name, x in bound.items()}
    owner = getattr(function, "__self__", None)
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None) if owner is None else owner
    if not hasattr(function, "__code__"):  # an object of a class with __call__
        owner, function = function, inspect.unwrap(type(function).__call__)
    known = getattr(owner, "__dict__", {})  # `getattr` would run properties
    others |= {f"self.{x}": partial(known.get, x) for x in _attributes_read(function) if known}
    closure: Getters = {"the object of the method": partial(_same, owner)}
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:  # not a Python function
        return closure, others
    written = {x.argval for x in dis.get_instructions(code) if x.opname in _STORE}
    names = [x for x in inspect.getclosurevars(function).globals if x not in written]
    closure |= {name: partial(function.__globals__.get, name) for name in names}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure |= {name: partial(_content, cell) for name, cell in cells if name not in written}
    return closure, others


def _same(x: Any) -> Any:
    return x


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _attributes_read(method: Any) -> list[str]:
    """The attributes of its object that a method reads, such as the teacher of a trainer."""
    code = getattr(method, "__code__", None)
    if code is None or not code.co_varnames:
        return []
    self, found = code.co_varnames[0], []
    for before, now in pairwise(dis.get_instructions(code)):
        if before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and now.opname in _LOAD_ATTRIBUTE:
            names = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if names[-1] == self:
                found.append(now.argval)
    return found


class OutsideValues:
    """Warns of numbers and arrays that a function reads from outside, and that have changed.

    A compiled function goes on with those that it had when it was compiled.

    Args:
      function: the user's function.
      what: its name in the message.
    """

    def __init__(self, function: Callable[..., Any], what: str):
        self._function, self._what = function, what
        self._getters: Getters | None = None
        self._before: dict[str, Any] = {}

    def look(self, arguments: Any) -> None:
        """Compares with the last call; nothing inside a trace, where all is compiled again."""
        if self._getters is not None and not self._getters:
            return
        if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(arguments)):
            return
        if self._getters is None:
            closure, others = read_from_outside(self._function)
            del closure["the object of the method"]
            found = {name: (get, _compared(get())) for name, get in (closure | others).items()}
            self._getters = {k: get for k, (get, x) in found.items() if x is not None}
            self._before = {k: x for k, (_, x) in found.items() if x is not None}
            return
        now = {name: _compared(get()) for name, get in self._getters.items()}
        changed = [name for name, x in now.items() if _differ(self._before[name], x)]
        self._before = now
        if changed:
            warn(
                f"{self._what} reads {some(changed)} from outside, which has changed since the "
                "call before: it goes on with the value that it was compiled with. Pass a number "
                "in the batch, as an array without dimensions "
                '(batch["scale"] = np.float32(scale)), and another model as a part of the model '
                "that is trained (docs/losses.md, What a loss reads from outside)."
            )


def _compared(x: Any) -> Any:
    """A number, or the arrays of a tree; None for what else a function may read."""
    if isinstance(x, (bool, int, float, complex, np.generic)):
        return x
    leaves = [y for y in jax.tree.leaves(x) if isinstance(y, (jax.Array, np.ndarray))]
    return leaves if leaves and not any(isinstance(y, core.Tracer) for y in leaves) else None


def _differ(before: Any, now: Any) -> bool:
    if not isinstance(before, list) or not isinstance(now, list):
        return isinstance(before, list) is not isinstance(now, list) or bool(before != now)
    return len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True))
