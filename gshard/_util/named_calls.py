"""Calls that the evaluation of a loss finds by name in the traced loss, to run them in its own way.

A traced call has its name alone, which JAX passes on to what it makes of the call, such as its
derivative. So the name itself has what is behind it, which is then forgotten with the program.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import core

from gshard._util.jaxpr import JIT

T = TypeVar("T")

_numbers = itertools.count()


@dataclass(frozen=True)
class _Known(Generic[T]):
    """What is behind a name.

    Attributes:
      what: the operation, for people.
      jaxpr: what it computes on one device, by a weak reference: caches of JAX keep a name for as
        long as its jaxpr. A call of the same name and another jaxpr is what a transformation
        inside the loss has made of it, such as `jax.vmap` or `jax.grad`.
      behind: what the evaluation runs.
    """

    what: str
    jaxpr: weakref.ref[Any]
    behind: T


class _Name(str):
    """The name of a call, with what is behind it."""

    known: _Known[Any]


def call_by_name(
    what: str,
    fun: Callable[..., Any],
    arrays: Sequence[Any],
    behind: Callable[[Callable[..., Any], Any], Any],
) -> Any:
    """Calls `fun(*arrays)`, in a trace by a name of its own.

    Behind that name is `behind(traced, jaxpr)`, of the function that is called and its jaxpr.
    """
    if not any(isinstance(x, core.Tracer) for x in arrays):
        return fun(*map(jnp.asarray, arrays))

    def named(*arrays: Any) -> Any:
        return fun(*arrays)

    named.__name__ = name = _Name(f"gshard_call_{next(_numbers)}")
    jitted = jax.jit(named)
    jaxpr = jitted.trace(*arrays).jaxpr
    name.known = _Known(what, weakref.ref(jaxpr), behind(jitted, jaxpr))
    return jitted(*arrays)


def behind_call(eqn: Any, kind: type[T], transformed: bool = False) -> T | None:
    """Returns what is behind an equation, if it is of this kind.

    Without `transformed` it is None for what a transformation has made of a call.
    """
    name = eqn.params["name"] if eqn.primitive.name == JIT else None
    if not isinstance(name, _Name) or not isinstance(name.known.behind, kind):
        return None
    return name.known.behind if transformed or eqn.params["jaxpr"] is name.known.jaxpr() else None


def name_of(eqn: Any) -> str:
    """The operation of an equation, for people."""
    if eqn.primitive.name != JIT:
        return eqn.primitive.name
    name = eqn.params["name"]
    return name.known.what if isinstance(name, _Name) else name
