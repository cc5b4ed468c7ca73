"""How gshard's own step calls these operations: for full sequences, evaluated on slices later.

A step of gshard traces a loss as if each device had full sequences. There an operation is a call of
its single-device result by a name; the evaluation of the loss finds the name, and runs on each
device what it does with slices.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from gshard._util.named_calls import call_by_name

_full: ContextVar[str | None] = ContextVar("axis of which a device has everything", default=None)


@dataclass(frozen=True)
class Call:
    """An operation on slices of a sequence.

    Attributes:
      run: of the arrays that one device has, inside a `shard_map` over the axis, and by keyword
        whether the device has its tokens in zig-zag order (`order=`).
      dims: the dimension of the sequence of each operand, None for one without.
      result: that of the result.
      traced: the function that was traced.
      jaxpr: what it computes on one device.
      mapped: of jaxprs that were compared with what `jax.vmap` makes of it, the mapped dimensions.
    """

    run: Callable[..., Any]
    dims: Sequence[int | None]
    result: int
    traced: Callable[..., Any]
    jaxpr: Any
    mapped: dict[Any, Any] = field(default_factory=dict, compare=False)


@contextmanager
def full_sequences(axis: str) -> Iterator[None]:
    """Traces operations on this axis for full sequences."""
    token = _full.set(axis)
    try:
        yield
    finally:
        _full.reset(token)


def full_axis() -> str | None:
    """The axis over which sequences are sharded that are in full here; None where none are."""
    return _full.get()


def sees_full_sequences(axis: str) -> bool:
    """Whether sequences that are sharded over the axis are in full here."""
    return full_axis() == axis


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

            own, arrays = [*map(dims.get, names)], [given[name] for name in names]
            call = partial(Call, run, own, result)
            return call_by_name(f"gshard.sequence.{fun.__name__}", run, arrays, call)

        return wrapped

    return decorate
