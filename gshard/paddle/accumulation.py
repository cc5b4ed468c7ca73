"""What a wrapped model keeps between calls: its gradients, from `backward` to `clear_grad`.

Inside `no_sync` each device adds up its own; the first `backward` outside reduces the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from gshard.arguments import shown
from gshard.batch import shard_batch
from gshard.errors import GShardError, some, warn
from gshard.loss import Weighted
from gshard.paddle import phases
from gshard.paddle.on_model import OnModel
from gshard.paddle.phases import Inputs, Phases
from gshard.paddle.reached import unreached
from gshard.plan import Plan
from gshard.unreduced import Unreduced

MANY = 8  # loss functions, each of which is compiled


@dataclass(frozen=True)
class Scaled:
    """A loss that is multiplied by the scale of a scaler; its batch is `(batch, scale)`."""

    loss_fn: Callable[..., Any]
    scaler: Any

    def __call__(self, model: nnx.Module, batch: Any) -> Any:
        """The loss of a batch times its scale."""
        batch, scale = batch
        loss = self.loss_fn(model, batch)
        if isinstance(loss, Weighted):
            return Weighted(loss.sum * scale, loss.weight)
        return loss * scale


class Accumulation:
    """The gradients of a wrapped model, and its compiled phases.

    Attributes:
      plan: where everything lies.
      model: the wrapped model.
      optimizer: the wrapped optimizer, if any.
      wrt: the filter of what is trained.
      grads: an `nnx.State` like the trained parameters, reduced: the sum over the calls of
        `backward` since they were cleared. Or None.
      scaler: whose scale they are multiplied by; None where they are not.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        buffer_max_size: int,
        end_buffer_size: int,
        find_unused: bool = False,
        **options: Any,
    ):
        """`options` are those of `gshard.value_and_grad`."""
        self.plan = plan
        self.model: Any = None
        self.optimizer: Any = None
        self.grads: nnx.State | None = None
        self.scaler: Any = None
        self.wrt: Any = plan.template[1].wrt
        self._find_unused = find_unused
        self._pending: Unreduced | None = None
        self._depth = 0
        sizes = {"buffer_max_size": buffer_max_size, "end_buffer_size": end_buffer_size}
        self._phases = Phases(plan, sizes, options)
        self._of_loss: dict[Any, Any] = {}
        self._forward = OnModel(self._phases.forward, self.wrt)
        self._reduce = nnx.jit(self._phases.reduce)
        self._unscale = nnx.jit(phases.unscale)
        self._update = nnx.jit(phases.update, donate_argnums=(0, 1))
        self._update_if = nnx.jit(phases.update_if, donate_argnums=(0, 1))

    def call(self, args: Any, kwargs: Any) -> Any:
        """The model's output; numbers, strings and the like among the inputs are fixed."""
        arrays, rest = Inputs.of((args, kwargs))
        return self._forward(self.model, [self._placed(x) for x in arrays], fixed=rest)

    def backward(self, loss_fn: Callable[..., Any], batch: Any) -> jax.Array:
        """Adds the gradient of `loss_fn(model, batch)` to what is there, and returns the loss."""
        if not callable(loss_fn):
            raise GShardError(
                f"backward(loss_fn, batch): loss_fn={shown(loss_fn)} is not a function. It takes "
                "(model, batch) and returns the mean loss over the rows."
            )
        scaler = loss_fn.scaler if isinstance(loss_fn, Scaled) else None
        there = self.grads is not None or self._pending is not None
        if there and scaler is not self.scaler:
            raise GShardError(
                "backward: gradients that are multiplied by a scale and others would be added up. "
                "Use scaler.scale(loss_fn) every time, or optimizer.clear_grad() first."
            )
        batch = shard_batch(batch, self.plan)
        given = batch if scaler is None else (batch, scaler.loss_scaling)
        run = self._compiled(loss_fn, given)
        if self._depth:
            loss, self._pending = run(self.model, given, self._pending)
        else:
            loss, self.grads = run(self.model, given, self._pending, self.grads)
            self._pending = None
        self.scaler = scaler
        return loss if scaler is None else loss / given[1]

    def reduce(self) -> None:
        """Ends what `no_sync` left on each device; nothing where there is none."""
        if self._pending is not None:
            self.grads, self._pending = self._reduce(self._pending, self.grads), None

    def take(self) -> nnx.State:
        """The gradients, for an optimizer.

        Raises:
          GShardError: there are none, or some are not reduced.
        """
        if self._pending is not None:
            raise GShardError(
                "step: gradients of no_sync() have not been reduced over the devices. Call one "
                "backward outside it, or fused_allreduce_gradients(model.parameters(), None)."
            )
        if self.grads is None:
            raise GShardError("step: there are no gradients. Call model.backward(loss_fn, batch).")
        return self.grads

    def unscale(self, scale: jax.Array) -> jax.Array:
        """Divides the gradients by their scale; whether every entry is finite."""
        self.grads, finite = self._unscale(self.take(), scale)
        self.scaler = None
        return finite

    def step(self, finite: jax.Array | None = None) -> None:
        """Updates model and optimizer; where `finite` is given and false nothing is changed."""
        given = (self.model, self.optimizer, self.take())
        if finite is None:
            self._update(*given)
        else:
            self._update_if(*given, finite)

    def clear(self) -> None:
        """Forgets all gradients."""
        self.grads = self._pending = self.scaler = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it nothing of a gradient moves; nestable."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def lower(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        """The next `backward`, lowered, for `gshard.audit`."""
        batch = shard_batch(batch, self.plan)
        held = (self._pending,) if self._depth else (self._pending, self.grads)
        return self._compiled(loss_fn, batch).lower(self.model, batch, *held)

    def _placed(self, x: Any) -> jax.Array:
        """One input, by rows over the devices where these divide, else whole on each of them."""
        if x.ndim and x.shape[0] and x.shape[0] % self.plan.group.devices == 0:
            return shard_batch(x, self.plan)
        return jax.device_put(x, self.plan.sharding())

    def _compiled(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        key = (loss_fn, self._depth > 0)
        if key not in self._of_loss:
            if self._find_unused and (loss_fn, not self._depth) not in self._of_loss:
                self._report_unused(loss_fn, batch)
            if len(self._of_loss) == MANY:
                warn(
                    f"backward has been given {MANY} different loss functions, and each is "
                    "compiled. Define it once, outside the loop."
                )
            if self._depth:
                local = partial(self._phases.local, loss_fn)
                self._of_loss[key] = OnModel(local, self.wrt, donated=(1,))
            else:
                backward = partial(self._phases.backward, loss_fn)
                self._of_loss[key] = OnModel(backward, self.wrt)
        return self._of_loss[key]

    def _report_unused(self, loss_fn: Callable[..., Any], batch: Any) -> None:
        paths = unreached(loss_fn, self.plan.template[0], self.wrt, batch)
        if paths:
            warn(
                f"the loss does not reach {some(paths)}: their gradients are zero. Use them, or "
                "leave them out of the optimizer's wrt=."
            )
