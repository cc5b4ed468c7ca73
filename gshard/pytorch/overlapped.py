"""`overlap_with_ddp=True`: the update is in the program of `backward`, with the reduction.

The update of a parameter needs its own gradient alone, so the compiler may start it when that is
reduced. The first step updates like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gshard._util.errors import CallOrderError
from gshard.pytorch.even import Even


class Overlapped:
    """What `DataParallel.backward` runs beside the gradients."""

    def __init__(self, engine: Even, values: Callable[[], Any]):
        """`values` returns the hyperparameters of now."""
        self.updated, self._engine, self._values = engine.updated, engine, values
        self._done = False

    def arguments(self) -> tuple[Any, Any]:
        """The optimizer's state, which is given away, and hyperparameters."""
        return self._engine.state, self._values()

    def accept(self, new: Any, state: Any) -> None:
        """Takes new parameters and state over."""
        self._engine.accept(new, state)
        self._done = True

    def end(self) -> None:
        """What is left of `step()`.

        Raises:
          CallOrderError: `backward` has not been called since the last one.
        """
        if not self._done:
            raise CallOrderError("step: there are no gradients. Call backward(loss_fn, batch).")
        self._done = False
