"""What a loss function of `backward` wraps, and the models that it reads from outside."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gshard._util.errors import GShardError, some, warn
from gshard.train.loss import Weighted

_LOAD_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Scaled:
    """A loss multiplied by the scale of a scaler; its batch is `(batch, scale)`."""

    loss_fn: Callable[..., Any]
    scaler: Any

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """Returns the loss of a batch times its scale."""
        batch, scale = batch
        loss = self.loss_fn(model, batch)
        if isinstance(loss, Weighted):
            return Weighted(loss.sum * scale, loss.weight)
        return loss * scale if hasattr(loss, "dtype") else loss  # others are refused later


@dataclass(frozen=True)
class Joined:
    """A loss for devices of which some have no data left; its batch is `(batch, shares)`.

    Attributes:
      loss_fn: the loss.
      initial: whether the mean is over all devices, and not only over those that have data.
    """

    loss_fn: Callable[..., Any]
    initial: bool

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """Returns the loss on one device; `shares` has one entry per example, all 1 or all 0."""
        batch, shares = batch
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Weighted):
            loss = Weighted(jnp.asarray(loss), jnp.ones(()))
        total = jnp.where(shares[0] > 0, loss.sum, 0)
        return Weighted(total, loss.weight if self.initial else loss.weight * shares[0])


def code_of(loss_fn: Any) -> Any:
    """Returns what functions that are made again in a loop have in common: their code, or class."""
    function = _unwrapped(loss_fn)[0]
    return getattr(function, "__code__", type(function))


def check_closure(loss_fn: Any, model: nnx.Module) -> None:
    """Warns of models that a loss reads from outside: once compiled, it sees their first values.

    If it is the wrapped model itself, in the closure, this raises a `GShardError`: there it would
    have no gradient. Of a method's object and in a partial it may be there for something else.
    """
    function, found = _unwrapped(loss_fn)
    owner = getattr(function, "__self__", None)
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None) if owner is None else owner
    if not hasattr(function, "__code__"):  # an object of a class with __call__
        owner, function = function, inspect.unwrap(type(function).__call__)
    found.update({f"self.{name}": x for name, x in _read_of(owner, function).items()})
    closure: dict[str, Any] = {"the object of the method": owner}
    try:
        variables = inspect.getclosurevars(function)
        closure.update({**variables.globals, **variables.nonlocals})
    except TypeError:  # not a Python function
        pass
    own = [name for name, x in closure.items() if x is model]
    if own:
        raise GShardError(
            f"backward: the loss reads the model as {own[0]}, from outside, and not as its first "
            "argument: it would have no gradient. Use the model that the loss is called with."
        )
    if read := [name for name, x in (closure | found).items() if _has_arrays(x)]:
        warn(
            f"backward: the loss reads {some(read)} from outside. It is compiled with the values "
            "of now; where they change, pass them in the batch (nnx.split(other), and nnx.merge in "
            "the loss)."
        )


def _unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the user's function, and by name what `functools.partial` has bound in it."""
    bound: dict[str, Any] = {}
    while isinstance(loss_fn, (Scaled, Joined, partial)):
        if isinstance(loss_fn, partial):
            bound |= {f"argument {i + 1} of a partial": x for i, x in enumerate(loss_fn.args)}
            bound |= {f"{name} of a partial": x for name, x in loss_fn.keywords.items()}
            loss_fn = loss_fn.func
        else:
            loss_fn = loss_fn.loss_fn
    return loss_fn, bound


def _read_of(owner: Any, method: Any) -> dict[str, Any]:
    """The attributes of its object that a method reads, such as the teacher of a trainer."""
    known, code = getattr(owner, "__dict__", {}), getattr(method, "__code__", None)
    if not known or code is None or not code.co_varnames:
        return {}
    self, found = code.co_varnames[0], {}
    for before, now in pairwise(dis.get_instructions(code)):
        if before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and now.opname in _LOAD_ATTRIBUTE:
            names = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if names[-1] == self:
                found[now.argval] = known.get(now.argval)  # `getattr` would run properties
    return found


def _has_arrays(x: Any) -> bool:
    return isinstance(x, nnx.Module) and bool(jax.tree.leaves(nnx.state(x)))
