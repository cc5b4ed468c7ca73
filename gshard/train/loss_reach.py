"""Notices whether the gradient of a loss reaches any trained parameter, while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard.train.microbatch import DeviceInputs, MicroBatchLoss


class CheckedLoss(MicroBatchLoss):
    """A `MicroBatchLoss` that knows, once called, if the loss depends on what it differentiates.

    JAX asks for the forward rule of a `custom_vjp` only where it differentiates with respect to an
    operand, so that the rule of an identity tells. It leaves nothing in the compiled program.
    """

    differentiated = False

    def _at(self, given: DeviceInputs, i: Any, scope: Any) -> tuple[Callable[..., Any], Any, Any]:
        at, points, overwritten = super()._at(given, i, scope)
        identity = jax.custom_vjp(lambda loss: loss)

        def forward(loss: jax.Array) -> tuple[jax.Array, None]:
            self.differentiated = True
            return loss, None

        identity.defvjp(forward, lambda _, cotangent: (cotangent,))

        def checked(*args: Any) -> Any:
            found = at(*args)
            if self.global_batch.collects:
                return found
            loss, rest = found
            return identity(loss), rest

        return checked, points, overwritten

    def refuse_unreached(self, name: str) -> None:
        """Refuses a loss, by its name, whose gradient was traced and is zero for all parameters."""
        has_entries = any(0 not in layout.shape for layout in self.stored)
        if has_entries and not self.differentiated:
            raise GShardError(
                f"{name} does not depend on the parameters that it is given: their gradient is "
                "zero. Either it ignores its first argument, perhaps because it uses parameters or "
                "a model that it closes over, or it stops the gradient (stop_gradient, argmax, "
                "round). Compute the loss from the first argument. What should not be trained goes "
                "into frozen= of shard_train_state (NNX: wrt= of the optimizer)."
            )
