"""Calls that the evaluation of a loss finds by name in the traced loss, to run them in its own way.

A traced call has its name alone. What is behind it is remembered here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import core

from gshard._util.jaxpr import JIT

T = TypeVar("T")

_numbers = itertools.count()
_calls: dict[str, _Known[Any]] = {}


@dataclass(frozen=True)
class _Known(Generic[T]):
    """What is behind a name.

    Attributes:
      what: the operation, for people.
      jaxpr: what it computes on one device. A call of the same name and another jaxpr is what a
        transformation inside the loss has made of it, such as `jax.vmap` or `jax.grad`.
      behind: what the evaluation runs.
    """

    what: str
    jaxpr: Any
    behind: T


def call_by_name(
    what: str,
    fun: Callable[..., Any],
    arrays: Sequence[Any],
    behind: Callable[[Callable[..., Any], Any], Any],
) -> Any:
    """Calls `fun(*arrays)`, in a trace by a name of its own.

    Remembered by that name is `behind(traced, jaxpr)`, of the function that is called and its
    jaxpr.
    """
    if not any(isinstance(x, core.Tracer) for x in arrays):
        return fun(*map(jnp.asarray, arrays))

    def named(*arrays: Any) -> Any:
        return fun(*arrays)

    named.__name__ = f"gshard_call_{next(_numbers)}"
    jitted = jax.jit(named)
    jaxpr = jitted.trace(*arrays).jaxpr
    _calls[named.__name__] = _Known(what, jaxpr, behind(jitted, jaxpr))
    return jitted(*arrays)


def behind_call(eqn: Any, kind: type[T], transformed: bool = False) -> T | None:
    """Returns what is behind an equation, if it is of this kind.

    Without `transformed` it is None for what a transformation has made of a call.
    """
    known = _calls.get(eqn.params["name"]) if eqn.primitive.name == JIT else None
    if known is None or not isinstance(known.behind, kind):
        return None
    return known.behind if transformed or eqn.params["jaxpr"] is known.jaxpr else None


def name_of(eqn: Any) -> str:
    """The operation of an equation, for people."""
    if eqn.primitive.name != JIT:
        return eqn.primitive.name
    name = eqn.params["name"]
    return _calls[name].what if name in _calls else name
