"""Maxima over the devices of one axis, which the evaluation over the next axes recognizes.

With micro-batches a maximum over examples is known after the last one. Until then it stays apart,
also where it was first taken over positions: as a call by a name, which has what completes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.source_info_util import current_name_stack

from gshard._util.jaxpr import JIT
from gshard.train.comm.examples import extreme_of_examples
from gshard.train.global_loss.placement import Placement

_numbers = itertools.count()
_calls: dict[str, tuple[Any, Callable[..., Any], tuple[int, ...], bool]] = {}


def extreme_for_next(x: Any, dims: tuple[int, ...], largest: bool, axes: Sequence[str]) -> Any:
    """Returns `extreme_of_examples` as a call."""
    scope = str(current_name_stack())  # names what needs it, and the user's line

    def call(x: Any) -> Any:
        with jax.named_scope(scope):
            return extreme_of_examples(x, dims, largest, axes)

    call.__name__ = f"gshard_extreme_{next(_numbers)}"
    jitted = jax.jit(call)
    _calls[call.__name__] = jitted.trace(x).jaxpr, call, dims, largest
    return jitted(x)


def extreme_call(eqn: Any, placement: Placement) -> tuple[Callable[..., Any], bool] | None:
    """What an equation computes if it is such a call over examples, and whether it is a maximum.

    `placement` is that of its operand. A maximum over positions alone is no such call.
    """
    name = eqn.params["name"] if eqn.primitive.name == JIT else ""
    jaxpr, call, dims, largest = _calls.get(name, (None, None, (), False))
    if call is None or eqn.params["jaxpr"] is not jaxpr or placement.dim not in dims:
        return None
    return call, largest
