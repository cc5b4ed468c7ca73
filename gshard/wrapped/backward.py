"""`model.backward`: what a user calls, and what `gshard.audit` lowers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard.wrapped.accumulation import Accumulation


class Backward:
    """`model.backward`: called, a forward and a backward pass.

    Attributes:
      plan: where everything lies.
    """

    def __init__(self, keep: Accumulation):
        self.plan, self._keep = keep.plan, keep

    def __call__(self, loss_fn: Callable[..., Any], batch: Any) -> jax.Array:
        """Adds the gradient to `model.grads`.

        Args:
          loss_fn: `loss_fn(model, batch)`, the mean over the rows it is given. It is compiled:
            define it once, and pass what changes from call to call in the batch; numbers that it
            reads from outside are those of the first call. `scaler.scale(loss_fn)` for float16.
          batch: of this process; its rows are laid over the devices.

        Returns:
          The loss of the global batch, a scalar; inside `no_sync` that of each device, `(devices,)`
          (`.mean()` is that of all).
        """
        return self._keep.backward(loss_fn, batch)

    def lower(self, loss_fn: Callable[..., Any], batch: Any) -> jax.stages.Lowered:
        """The next call, lowered; nothing runs. `gshard.audit(model.backward, loss_fn, batch)`."""
        return self._keep.lower(loss_fn, batch)
