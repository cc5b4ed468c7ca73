"""Keeps the gradients of a wrapped model between calls, from `backward` to `clear_grad`.

Inside `no_sync` each device accumulates its local gradients; the first `backward` outside reduces
the sum. Buffers that the loss changes differ between devices until the block ends, and are then
made equal on all devices.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax import core

from gshard._util.closure import OutsideValues
from gshard._util.errors import GShardError, place_of, some, warn
from gshard._util.in_flight import limit_in_flight
from gshard._util.pytree import flatten
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.data.batch import shard_batch
from gshard.sharding.plan import Plan, original_of
from gshard.sharding.validate import refuse_donated
from gshard.train.gradients import LocalGradients
from gshard.train.made_in_loop import code_of
from gshard.train.padding_mask import MaskCheck
from gshard.train.same_program import ProgramCheck
from gshard.wrapped import compiled_fns
from gshard.wrapped.compiled_fns import (
    OnModel,
    Phases,
    refuse_other_parameters,
    unused_params,
)
from gshard.wrapped.loss_fns import Joined, Scaled, check_closure, own_loss
from gshard.wrapped.same_hyperparameters import SameHyperparameters

MANY = 64  # loss functions whose programs are kept
_WEIGHTED = (  # each device has a mean of its own, and some may have no example
    "Return gshard.Weighted((x * mask).sum(), mask.sum()) from the loss."
)
_WITHOUT_SYNC = f"Call backward outside no_sync for such a batch. {_WEIGHTED}"


class Updating(Protocol):
    """An optimizer whose update is in the program of `backward`."""

    def arguments(self) -> tuple[Any, Any]:
        """Returns the optimizer's state, which is donated, and its hyperparameters."""
        ...

    def updated(self, params: Any, grads: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """Returns new parameters and state; called while tracing."""
        ...

    def accept(self, new: Any, state: Any) -> None:
        """Stores what `updated` returned."""
        ...

    def end(self) -> None:
        """Finishes the step when the user calls the optimizer after `backward`."""
        ...


class Accumulation:
    """`model.backward`: a call runs a forward and a backward pass, and keeps the gradients.

    Attributes:
      plan: the layout of every array.
      model: the wrapped model.
      optimizer: the wrapped optimizer, if any.
      grads: the reduced gradients, an `nnx.State` like the trained parameters: the sum over the
        calls of `backward` since they were cleared; or None.
      scaler: the scaler by whose scale the gradients are multiplied; or None.
      scale: that scale, of all gradients since they were cleared, also if the scaler has another by
        now, as after the step of another model; or None.
      forward: the compiled function that computes the output of the model or of a copy.
      joined: for each device of this process 1 if it has data left, else 0, and whether the mean
        is over all devices anyway; or None.
      stepped_by: the owner of an optimizer that is not wrapped; or None.
      rates: the learning rates that this process has set.
      updating: updates the model within `backward`, which then keeps no gradients; or None.
      finite: whether every entry of the unscaled gradients is finite; None before unscaling.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        bucket_size: int,
        end_bucket_size: int,
        find_unused: bool = False,
        **options: Any,
    ):
        """Prepares the compiled phases; `options` are those of `gshard.value_and_grad`."""
        self.model: Any = None
        self.optimizer: Any = None
        self.grads: nnx.State[Any, Any] | None = None
        self.scaler: Any = None
        self.scale: Any = None
        self.finite: jax.Array | None = None
        self.stepped_by: Any = None
        self.joined: tuple[np.ndarray, bool] | None = None
        self.updating: Updating | None = None
        self.rates: SameHyperparameters = SameHyperparameters(
            "set_lr", "Set the same one on all processes, such as the mean of theirs."
        )
        self._find_unused = find_unused
        self._pending: LocalGradients | None = None
        self._buffers: dict[str, Any] = {}
        self._depth = 0
        self._before: tuple[list[Any], ...] = ()
        self._looks_left = 2  # at the parameters, for `_warn_of_original`
        self._sizes = {"bucket_size": bucket_size, "end_bucket_size": end_bucket_size}
        self._options = options
        self._free: Any = lambda: None
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Switches to another plan and drops all gradients."""
        self.settle()
        self.clear()
        wrt = plan.template[1].wrt
        self.plan: Plan = plan
        self._phases = Phases(plan, self._sizes, self._options)
        self._of_loss: dict[Any, OnModel] = {}
        check = ProgramCheck(plan, "model(...)")
        self.forward: OnModel = OnModel(self._phases.forward, wrt, check=check)
        # The class of the model has it too, and JAX's registry of pytrees keeps classes for ever.
        self._free()
        self._free = weakref.finalize(self, self.forward.clear)
        self._free.atexit = False
        self._settle = OnModel(self._phases.settle, wrt)
        self._reduce = nnx.jit(self._phases.reduce)
        self._unscale = nnx.jit(compiled_fns.unscale)
        self._unpad = jax.jit(self._phases.unpad)
        # The model's arrays are not donated: copies of a model (nnx.clone) have them too.
        self._update = nnx.jit(compiled_fns.update, donate_argnums=1)

    @short_traceback
    def __call__(
        self, loss_fn: Callable[..., Any], batch: Any = None, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """Adds the gradient to `model.grads`.

        Args:
          loss_fn: `loss_fn(model, batch)`, the mean over the given examples. It is compiled:
            define it once, and pass what changes from call to call in the batch; numbers that it
            reads from outside are those of when it was compiled (where they change, a warning says
            so). `scaler.scale(loss_fn)` for float16.
          batch: the batch of this process; its examples are sharded over the devices. Several
            arrays are one tree, such as `(x, y)`.
          *args: refused, with a hint.
          **kwargs: refused, with a hint.

        Returns:
          The loss of the global batch, a scalar; inside `no_sync` that of each device, `(devices,)`
          (`.mean()` is that of all). Inside `Join` it is divided as the gradients are: by default
          by the number of all devices, also of those that have no data left.
        """
        _refuse_more(args, kwargs)
        scaler = self._check_call(loss_fn, batch)
        if not self.holds and self._looks_left:
            self._warn_of_original()
        scale = self._scale_of(loss_fn)
        loss_fn, given = self._given(loss_fn, batch, scale)
        compiled = self._compiled(loss_fn, given)
        try:
            loss, *new = compiled(self.model, given, *self._stored())
        except ValueError:
            params = self.plan.kind.split_target(self.model, {}).params
            refuse_other_parameters(params, self.plan)
            raise
        if self._depth:
            self._pending, self._buffers = new
        elif self.updating is not None:
            self.updating.accept(*new)
            self._pending = self.grads = None
        else:
            self._pending, [self.grads] = None, new
        self.scaler, self.scale = scaler, scale
        limit_in_flight(loss)  # when all is stored: Ctrl-C may come while it waits
        return loss if scale is None else loss / scale

    def _warn_of_original(self) -> None:
        """Warns, at the second step, where the model that was wrapped is updated in its place."""
        models = original_of(self.plan), self.model
        if models[0] is None:
            return
        # Arrays of before are not kept alive; numbers cannot be referred to.
        leaves = [jax.tree.leaves(nnx.state(x, nnx.Param)) for x in models]
        now = tuple([weakref.ref(x) for x in xs if isinstance(x, jax.Array)] for xs in leaves)
        before, self._before = self._before, now
        self._looks_left -= 1
        if self._looks_left:
            return
        pairs = [zip(a, b, strict=False) for a, b in zip(before, now, strict=True)]
        original, own = ([a() is not b() for a, b in x] for x in pairs)
        if any(original) and not any(own):
            warn(
                "since the last backward the model that was wrapped has changed, and the wrapped "
                "one has not: it is a copy. Make the optimizer of the wrapped model, "
                "nnx.Optimizer(model, tx, wrt=nnx.Param), and update that one: "
                "optimizer.update(model, model.grads)."
            )

    def _check_call(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        """Returns the scaler of the loss, or None; refuses a call that cannot be right."""
        scaler = loss_fn.scaler if isinstance(loss_fn, Scaled) else None
        if not callable(loss_fn):
            error = (
                f"backward(loss_fn, batch): loss_fn={shown(loss_fn)} is not a function. Pass one "
                "of (model, batch) that returns the mean loss over the examples."
            )
        elif any(isinstance(x, core.Tracer) for x in jax.tree.leaves(batch)):
            error = (
                "backward keeps gradients between calls, so it cannot be called in a jitted "
                "function. Use gshard.value_and_grad(loss_fn, model.plan)(model, batch) there."
            )
        elif self.finite is not None:
            error = (
                "backward: the gradients have been unscaled, and scaled ones would be added to "
                "them. Call scaler.step(optimizer) and optimizer.clear_grad() first."
            )
        elif _are_lost(self._pending):
            error = (
                "backward: an earlier call, which was interrupted or failed, has used up the "
                "gradients that no_sync had accumulated. Call model.clear_gradients() and "
                "accumulate again."
            )
        elif scaler is not None and self.updating is not None:
            error = (
                "backward: the loss is scaled, and the optimizer updates during backward "
                "(overlap_with_ddp=True). Make the optimizer without overlap_with_ddp."
            )
        elif self.holds and scaler is not self.scaler:
            error = (
                "backward: scaled and unscaled gradients would be added up. Use "
                "scaler.scale(loss_fn) every time, or call optimizer.clear_grad() first."
            )
        else:
            return scaler
        raise GShardError(error)

    def lower(
        self, loss_fn: Callable[..., Any], batch: Any = None, *args: Any, **kwargs: Any
    ) -> jax.stages.Lowered:
        """The next call, lowered; nothing runs. `gshard.audit(model.backward, loss_fn, batch)`."""
        _refuse_more(args, kwargs)
        if batch is None:
            raise GShardError("audit(model.backward, loss_fn, batch) needs the batch.")
        loss_fn, given = self._given(loss_fn, batch, self._scale_of(loss_fn))
        return self._compiled(loss_fn, given).lower(self.model, given, *self._stored())

    def reduce(self) -> None:
        """Reduces the local gradients that `no_sync` has accumulated, if there are any."""
        if self._pending is not None:
            self.grads, self._pending = self._reduce(self._pending, self.grads), None

    def unpadded(self) -> nnx.State[Any, Any] | None:
        """Returns the reduced gradients in the shapes of the parameters, and keeps them so."""
        if not self._phases.padded(self.grads):
            return self.grads
        grads = self._unpad(self.grads)
        with contextlib.suppress(TraceContextError):  # inside a jit or grad they would be tracers
            nnx.update(self.grads, grads)
        return grads if self._phases.padded(self.grads) else self.grads

    @property
    def holds(self) -> bool:
        """Whether there are gradients."""
        return self.grads is not None or self._pending is not None

    def settle(self) -> None:
        """Writes the buffers that `no_sync` left on each device into the model."""
        if self._buffers and not _are_lost(self._buffers):
            self._settle(self.model, self._buffers)
        self._buffers = {}

    def refuse_waiting(self) -> None:
        """Raises a `GShardError` if gradients of `no_sync` have not been reduced."""
        if self._pending is not None:
            raise GShardError(
                "gradients of no_sync() have not been reduced over the devices. Call one backward "
                "outside it; model.clear_gradients() discards them."
            )

    def refuse_scaled(self) -> None:
        """Raises a `GShardError` if the gradients are multiplied by a scale."""
        if self.scaler is not None:
            raise GShardError(
                "the gradients are multiplied by the scale of a scaler. Call "
                "scaler.step(optimizer) and scaler.update()."
            )

    def refuse_missing(self) -> None:
        """Raises a `GShardError` if the user set the gradients of a part to None."""
        paths, _, _ = flatten(self.grads)
        trained = [x.path for x in jax.tree.leaves(self.plan.params)]
        if missing := [path for path in trained if path not in paths]:
            raise GShardError(
                f"the gradients of {some(missing)} are None, which only the step of a "
                "gshard.pytorch.ZeroRedundancyOptimizer takes. To train a part alone, make the "
                "optimizer of it: nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, "
                "nnx.PathContains('head')))."
            )

    def take(self) -> nnx.State[Any, Any]:
        """Returns the reduced gradients; raises a `GShardError` if there are none."""
        self.refuse_waiting()
        if self.grads is None:
            raise GShardError("there are no gradients. Call model.backward(loss_fn, batch).")
        return self.grads

    def unscale(self) -> jax.Array:
        """Divides the gradients by their scale; returns whether every entry is finite."""
        self.grads, self.finite = self._unscale(self.take(), self.scale)
        self.scaler = self.scale = None
        return self.finite

    @short_traceback
    def step(self, finite: jax.Array | None = None) -> None:
        """Updates model and optimizer; if `finite` is given and false, nothing is changed."""
        grads = self.take()
        self.refuse_scaled()
        self.refuse_missing()
        refuse_donated(jax.tree.leaves(nnx.state(self.optimizer)))
        self._update(self.model, self.optimizer, grads, finite)

    def clear(self) -> None:
        """Drops all gradients."""
        self.grads = self._pending = self.scaler = self.scale = self.finite = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Turns off gradient reduction; only `p_g_os` communicates parameters. It can be nested."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.settle()

    def _stored(self) -> tuple[Any, ...]:
        """Returns what the compiled function takes besides the model and the batch."""
        if self._depth:
            return self._pending, self._buffers
        return self._pending, self.grads, *(self.updating.arguments() if self.updating else ())

    def _scale_of(self, loss_fn: Callable[..., Any]) -> jax.Array | None:
        """Returns the scale of a loss: that of the gradients to which its own are added."""
        if not isinstance(loss_fn, Scaled):
            return None
        return loss_fn.scaler.loss_scaling if self.scale is None else self.scale

    def _given(
        self, loss_fn: Callable[..., Any], batch: Any, scale: jax.Array | None
    ) -> tuple[Callable[..., Any], Any]:
        """Returns the loss function to compile, and its batch on the devices."""
        given = shard_batch(batch, self.plan)
        sizes = [
            x.shape[0] // self.plan.group.batch_shards for x in jax.tree.leaves(given) if x.ndim
        ]
        if isinstance(loss_fn, Scaled):
            loss_fn.scaler.compare(self.plan)
            given = (given, scale)
        if self.joined is None:
            return loss_fn, given
        if self._depth or self._pending is not None:
            raise GShardError(
                "no_sync and Join: devices without data have weight 0, and the total weight is "
                "only known when gradients are reduced. Call backward outside no_sync, and end an "
                "accumulation that no_sync began before the loop over join(...)."
            )
        shares, initial = self.joined
        of_examples = np.repeat(shares, sizes[0] if sizes else 1)
        return Joined(loss_fn, initial), (given, shard_batch(of_examples, self.plan))

    def _compiled(self, loss_fn: Callable[..., Any], batch: Any) -> OnModel:
        local, wrt = self._depth > 0, self.forward.wrt
        try:
            known = self._of_loss.pop((loss_fn, local), None)
        except TypeError as error:
            raise GShardError(
                f"backward: {shown(loss_fn)} cannot be hashed, so gshard cannot look up whether it "
                "is compiled already. Pass a function."
            ) from error
        if known is not None:  # at the end, after those that are dropped before it
            return self._of_loss.setdefault((loss_fn, local), known)
        check_closure(loss_fn, self.model)
        if self._find_unused and (loss_fn, not local) not in self._of_loss:
            if unused := unused_params(loss_fn, self.plan, wrt, batch):
                warn(f"the loss does not use {some(unused)}: their gradients are zero.")
        code = code_of(own_loss(loss_fn))
        kept = {own_loss(f) for f, at in self._of_loss if at == local} - {own_loss(loss_fn)}
        alike = [f for f in kept if code_of(f) == code]
        if len(alike) == 2:
            warn(
                f"backward was given {place_of(loss_fn)} as a new function three times, and each "
                "was compiled. If it is made in the loop, define it once, outside."
            )
        if len(self._of_loss) >= MANY:
            self._of_loss.pop(next(iter(self._of_loss)))
            if not alike:
                warn(
                    f"backward was given more than {MANY} losses. The {MANY} that were used last "
                    "are kept compiled; an older one is compiled again when it comes back. "
                    "Combine them into one function, and put what differs into the batch."
                )
        check = ProgramCheck(self.plan, f"backward of the loss {place_of(loss_fn)}")
        name = f"backward: the loss {place_of(own_loss(loss_fn))}"
        outside = OutsideValues(own_loss(loss_fn), name)
        mask = MaskCheck(name, "0/0", _WITHOUT_SYNC if local else _WEIGHTED, of_examples="none")
        run, donated = partial(self._phases.backward, loss_fn), ()
        if local:
            run, donated = partial(self._phases.local, loss_fn), (1, 2)
        elif self.updating is not None:
            run = partial(self._phases.backward_and_update, loss_fn, self.updating.updated)
            donated = (3,)
        made = OnModel(run, wrt, donated, check, outside, mask)
        return self._of_loss.setdefault((loss_fn, local), made)


def _are_lost(donated: Any) -> bool:
    """Whether a call that raised before its results were stored has used up its arguments."""
    return any(x.is_deleted() for x in jax.tree.leaves(donated))


def _refuse_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments after the batch, as PyTorch's and Paddle's models take them."""
    if args or kwargs:
        raise GShardError(
            "backward takes a loss function and one batch, and was given more arguments. Give a "
            "tuple, model.backward(loss_fn, (x, y)), to a loss_fn(model, batch)."
        )
