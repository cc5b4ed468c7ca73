"""Maxima over the devices of one axis, which the evaluation over the next axes recognizes.

With micro-batches a maximum over examples is known after the last one. Until then it stays apart,
also where it was first taken over positions: as a call by a name, which has what completes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.source_info_util import current_name_stack

from gshard._util.named_calls import behind_call, call_by_name
from gshard.train.comm.examples import extreme_of_examples
from gshard.train.global_loss.placement import Placement


@dataclass(frozen=True)
class Extreme:
    """A maximum over `dims` and the devices of `axes`, or a minimum, as `run` computes it."""

    run: Callable[..., Any]
    dims: tuple[int, ...]
    largest: bool
    axes: tuple[str, ...]

    def over(self, axes: Sequence[str]) -> Callable[[Any], Any]:
        """Returns the same over more axes, as a call."""
        return lambda x: extreme_for_next(x, self.dims, self.largest, (*self.axes, *axes))


def extreme_for_next(x: Any, dims: tuple[int, ...], largest: bool, axes: Sequence[str]) -> Any:
    """Returns `extreme_of_examples` as a call."""
    scope = str(current_name_stack())  # names what needs it, and the user's line

    def run(x: Any) -> Any:
        with jax.named_scope(scope):
            return extreme_of_examples(x, dims, largest, axes)

    name = "reduce_max" if largest else "reduce_min"
    return call_by_name(name, run, [x], lambda *_: Extreme(run, dims, largest, tuple(axes)))


def extreme_call(eqn: Any, placement: Placement) -> Extreme | None:
    """Returns what an equation computes if it is such a call over examples.

    `placement` is that of its operand. A maximum over positions alone is no such call.
    """
    found = behind_call(eqn, Extreme)
    return found if found is not None and placement.dim in found.dims else None
