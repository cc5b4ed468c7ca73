"""A value of the loss, as one device holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.train.global_loss.placement import Placement
from gshard.train.global_loss.positions import Positions


@dataclass(eq=False)
class Value:
    """A value of the global trace, as this device holds it.

    Attributes:
      placement: how it is held.
      aval: its global shape and dtype.
      array: what this device holds; None for a value that is not made yet.
      source: the equation and operands that make it, all replicated.
      depends: whether it depends on what is differentiated.
      positions: what is known of integers.
      quotient: numerator and denominator, of a scalar that is not divided yet.
      extreme: the maximum or minimum of this part, and whether it is a maximum.
      summed: what the loss itself sums over the devices.
      made_together: the results of the equation, of one that is put off.
      statistic: whether it is one of this micro-batch, of which gshard takes the largest.
    """

    placement: Placement
    aval: Any
    array: Any = None
    source: tuple[Any, Sequence[Value]] = (None, ())
    depends: bool = False
    positions: Positions | None = None
    quotient: tuple[Value, Value] | None = None
    extreme: tuple[Any, bool] | None = None
    summed: Value | None = None
    made_together: list[Value] = field(default_factory=list, repr=False)
    statistic: bool = False
    converted: dict[Placement, Any] = field(default_factory=dict)
