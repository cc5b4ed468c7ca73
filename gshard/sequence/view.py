"""How gshard's own step calls these operations: for full sequences, evaluated on slices later.

A step of gshard traces a loss as if each device had full sequences. There an operation is a call of
its single-device result by a name; the evaluation of the loss finds the name, and runs on each
device what it does with slices.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

_PREFIX = "gshard_sequence_"
_numbers = itertools.count()
_calls: dict[str, Call] = {}  # a traced call has its name alone
_full: ContextVar[str | None] = ContextVar("axis of which a device has everything", default=None)


@dataclass(frozen=True)
class Call:
    """An operation on slices of a sequence.

    Attributes:
      run: of the arrays that one device has, inside a `shard_map` over the axis, and by keyword
        whether the device has its tokens in zig-zag order (`order=`).
      jaxpr: what it computes on one device. A call of the same name and another jaxpr is what a
        transformation inside the loss has made of it, such as `jax.vmap` or `jax.grad`.
      traced: the function that was traced.
      dims: the dimension of the sequence of each operand, None for one without.
      result: that of the result.
      name: that of the operation.
      mapped: of jaxprs that were compared with what `jax.vmap` makes of it, the mapped dimensions.
    """

    run: Callable[..., Any]
    jaxpr: Any
    traced: Callable[..., Any]
    dims: Sequence[int | None]
    result: int
    name: str
    mapped: dict[Any, Any] = field(default_factory=dict, compare=False)


@contextmanager
def full_sequences(axis: str) -> Iterator[None]:
    """Traces operations on this axis for full sequences."""
    token = _full.set(axis)
    try:
        yield
    finally:
        _full.reset(token)


def sees_full_sequences(axis: str) -> bool:
    """Whether sequences that are sharded over the axis are in full here."""
    return _full.get() == axis


def call_of(name: str) -> Call | None:
    """Returns the operation that a traced call is, by its name."""
    return _calls.get(name)


def called_name(name: str) -> str:
    """Returns the name of the function that a traced call was made of."""
    call = _calls.get(name)
    return name if call is None else f"gshard.sequence.{call.name}"


def of_slices(dims: dict[str, int], result: int) -> Callable[..., Any]:
    """Decorates an operation that acts on each example by itself.

    `dims` are the dimensions of the sequence of its arrays, by the names of its arguments.
    """

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fun)

        @functools.wraps(fun)
        def wrapped(*args: Any, **options: Any) -> Any:
            if not sees_full_sequences(options.get("axis", "sequence")):
                return fun(*args, **options)
            given = signature.bind(*args, **options).arguments
            names = [name for name in dims if given.get(name) is not None]
            names += [x for x in given if x not in dims and isinstance(given[x], jax.Array)]
            static = {name: x for name, x in given.items() if name not in names}  # no tracers

            def run(*arrays: Any, **more: Any) -> Any:
                return fun(**{**static, **dict(zip(names, arrays, strict=True)), **more})

            def call(*arrays: Any) -> Any:
                return run(*arrays)

            call.__name__ = f"{_PREFIX}{fun.__name__}_{next(_numbers)}"
            jitted, arrays = jax.jit(call), [given[name] for name in names]
            jaxpr, own = jitted.trace(*arrays).jaxpr, [*map(dims.get, names)]
            _calls[call.__name__] = Call(run, jaxpr, jitted, own, result, fun.__name__)
            return jitted(*arrays)

        return wrapped

    return decorate
