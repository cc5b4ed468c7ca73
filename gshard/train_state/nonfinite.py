"""Non-finite gradients: loss scaling for float16, and the guard, which skips and counts such steps.

Both are part of the compiled step: no value is copied to the host. Source of loss scaling: mixed
precision training (Micikevicius et al., 2018), section 3.2; parameters, defaults and dynamics are
those of Paddle's `GradScaler`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import core, lax

from gshard._util.arguments import named_fields
from gshard._util.errors import GShardError, MissingAttributeError, NonFiniteError, some
from gshard._util.events import StepNumber
from gshard._util.validation import check_integer, check_integer_field, flag, shown


@struct.dataclass  # in a named tuple, optax.tree.get(opt_state, "scale") would find this scale
class ScalerState:
    """The state of a `GradScaler`, kept in the train state.

    Attributes:
      scale: float32 scalar, the current loss scale; 0 before the first step.
      good: int32 scalar, number of finite steps in a row since the scale last grew.
      bad: int32 scalar, number of non-finite steps in a row since the scale last shrank.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0)
      >>> isinstance(state.opt_state.scaler, gshard.ScalerState)
      True
    """

    scale: Any = np.float32(0)
    good: Any = np.int32(0)
    bad: Any = np.int32(0)


_FALLING = 10  # times `max_bad_steps` in a row, while the scale falls
_TINY, _LARGEST = (float(getattr(np.finfo(np.float32), name)) for name in ("tiny", "max"))
_INSTEAD = {  # of PyTorch's arguments
    "enabled": "It is enable= here.",
    "init_scale": "It is init_loss_scaling= here.",
    "growth_factor": "It is incr_ratio= here.",
    "backoff_factor": "It is decr_ratio= here.",
    "growth_interval": "It is incr_every_n_steps= here.",
    "device": "It needs no device: the scale is part of the train state.",
}
# How the calls of Paddle's and PyTorch's scalers begin.
_CALLS = (
    "get_",
    "is_",
    "load_state_dict",
    "loss_scaling",
    "minimize",
    "set_",
    "step",
    "unscale_",
    "update",
)
_SETTINGS_ONLY = (
    "a gshard.GradScaler only holds settings. For Paddle's calls, use the scaler that "
    "group_sharded_parallel returned; for make_train_step, pass it as scaler=: the step does the "
    "scaling."
)


@named_fields(_INSTEAD)
@dataclass(frozen=True)
class GradScaler:
    """Settings of loss scaling, which keeps small float16 gradients from becoming 0.

    Pass it as `scaler=` of `make_train_step`, or of `gshard.paddle.group_sharded_parallel`, which
    returns a scaler with Paddle's calls. If the gradient is not finite on some device, the
    step is skipped: it changes only the scaler's state and the counts of skipped steps.
    `decr_every_n_nan_or_inf` such steps in a row lower the scale.

    Args:
      enable: False turns loss scaling off.
      init_loss_scaling: the scale at the first step.
      incr_ratio: factor above 1 by which the scale grows after `incr_every_n_steps` finite steps.
      decr_ratio: factor below 1 by which the scale shrinks after `decr_every_n_nan_or_inf`
        non-finite steps in a row. The scale does not fall below 1.
      incr_every_n_steps: number of finite steps in a row, 1 or more.
      decr_every_n_nan_or_inf: number of non-finite steps in a row, 1 or more.
      use_dynamic_loss_scaling: False keeps the scale at `init_loss_scaling`.

    Raises:
      GShardError: an argument is out of range.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0)
      >>> step = gshard.make_train_step(loss_fn, plan, scaler=gshard.GradScaler())
      >>> state, metrics = step(state, gshard.shard_batch(batch, plan))
      >>> float(metrics["loss_scale"])
      65536.0
    """

    enable: bool = True
    init_loss_scaling: float = 2.0**16
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    use_dynamic_loss_scaling: bool = True

    def __post_init__(self) -> None:
        for name, fits, meaning in (
            (
                "init_loss_scaling",
                lambda x: _TINY <= x <= _LARGEST,
                "a positive number that float32 can hold",
            ),
            ("incr_ratio", lambda x: 1 < x < np.inf, "a number above 1"),
            ("decr_ratio", lambda x: 0 < x and np.float32(x) < 1, "a number between 0 and 1"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
                raise GShardError(f"{name}={shown(value)} must be {meaning}.")
            object.__setattr__(self, name, float(value))  # a float64 would widen the state
        for name in ("enable", "use_dynamic_loss_scaling"):
            flag(name, getattr(self, name))
        for name in ("incr_every_n_steps", "decr_every_n_nan_or_inf"):
            check_integer_field(self, name, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_CALLS):
            raise MissingAttributeError(f"GradScaler.{name}: {_SETTINGS_ONLY}")
        return object.__getattribute__(self, name)  # raises what Python says

    def scale(self, state: ScalerState) -> jax.Array:
        """Returns the scale of the next step, a float32 scalar."""
        if not isinstance(state, ScalerState):
            raise GShardError(f"{shown(state)} is not the state of a scaler: {_SETTINGS_ONLY}")
        first, scale = jnp.float32(self.init_loss_scaling), jnp.asarray(state.scale)
        return jnp.where(scale > 0, scale, first) if self.use_dynamic_loss_scaling else first

    def after(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        """Returns the state after a step, given whether its gradient was finite."""
        scale = self.scale(state)
        if not self.use_dynamic_loss_scaling:
            return replace(state, scale=scale)
        good = jnp.where(finite, state.good + 1, 0)
        bad = jnp.where(finite, 0, state.bad + 1)
        grows, shrinks = good >= self.incr_every_n_steps, bad >= self.decr_every_n_nan_or_inf
        grown = scale * self.incr_ratio
        scale = jnp.where(grows & jnp.isfinite(grown), grown, scale)
        least = jnp.minimum(scale, 1.0)  # Paddle's floor
        scale = jnp.where(shrinks, jnp.maximum(scale * self.decr_ratio, least), scale)
        return ScalerState(scale, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad))

    def state_dict(self, state: Any = None) -> dict[str, Any]:
        """Returns settings and counts by Paddle's names; empty when not enabled.

        Args:
          state: `state.opt_state.scaler` of a sharded train state; for NNX of its optimizer.
        """
        if not self.enable:
            return {}
        return {
            "scale": float(self.scale(state)),
            "incr_ratio": self.incr_ratio,
            "decr_ratio": self.decr_ratio,
            "incr_every_n_steps": self.incr_every_n_steps,
            "decr_every_n_nan_or_inf": self.decr_every_n_nan_or_inf,
            "incr_count": int(state.good),
            "decr_count": int(state.bad),
            "use_dynamic_loss_scaling": self.use_dynamic_loss_scaling,
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> tuple[GradScaler, ScalerState]:
        """Restores a scaler and its state from what `state_dict` returned.

        Raises:
          GShardError: keys are missing or unknown, or a value is out of range.
        """
        if not isinstance(saved, Mapping):
            raise GShardError(
                f"{shown(saved)} is not what GradScaler.state_dict returned. Pass that mapping."
            )
        if not saved:
            return cls(enable=False), ScalerState()
        settings, known = dict(saved), {*cls().state_dict(ScalerState())}
        if set(saved) != known:
            raise GShardError(
                f"the state of a GradScaler has the keys {sorted(known)}; got {sorted(saved)}. "
                "Pass what GradScaler.state_dict returned."
            )
        scale = settings.pop("scale")
        names, most = ("incr_count", "decr_count"), np.iinfo(np.int32).max
        counts = [jnp.int32(check_integer(x, settings.pop(x), 0, most=most)) for x in names]
        return cls(init_loss_scaling=scale, **settings), ScalerState(jnp.float32(scale), *counts)


def treats_nonfinite(opt_state: Any) -> bool:
    """Whether the optimizer of this state treats non-finite gradients itself."""
    return any(map(_treats, jax.tree.leaves(opt_state, is_leaf=_treats)))


def untreated(opt_state: Any, parameters: int) -> str:
    """Says which of this number of parameters get non-finite gradients that are treated in others.

    A group of `optax.partition` without a state (frozen, or of plain SGD) is not among them. Of
    masks nothing is said if one has no state, as where the other parameters are frozen.
    """

    def stops(x: Any) -> bool:
        return _treats(x) or isinstance(x, optax.PartitionState)

    outer = jax.tree.leaves(opt_state, is_leaf=stops)
    treated = [
        len(jax.tree.leaves(x.found_nan)) if isinstance(x, optax.ZeroNansState) else parameters
        for x in filter(_treats, outer)
    ]
    if sum(treated) >= parameters:
        return ""
    groups = [x.inner_states.items() for x in outer if isinstance(x, optax.PartitionState)]
    names = [
        str(name)
        for name, inner in itertools.chain(*groups)
        if jax.tree.leaves(inner) and not treats_nonfinite(inner)
    ]
    if names:
        return f"in some groups of optax.partition, and not in {some(names)}"
    masks = jax.tree.leaves(opt_state, is_leaf=_is_masked)
    if treated and not any(_is_masked(x) and not jax.tree.leaves(x) for x in masks):
        return f"for {max(treated)} of {parameters} parameters (optax.masked), not for the others"
    return ""


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedState)


def _treats(x: Any) -> bool:
    if isinstance(x, optax.MultiStepsState):  # with should_skip_update_fn=
        return bool(jax.tree.leaves(x.skip_state))
    return isinstance(x, (optax.ApplyIfFiniteState, optax.ZeroNansState))


LATE = 2  # number of steps that a run may be ahead of the last guard that was checked


@struct.dataclass
class Guard:
    """Counts of skipped steps in the train state, int32 scalars.

    Attributes:
      row: number of non-finite steps in a row.
      first: number of the step at which they began.
      skipped: number of all steps that changed nothing: non-finite ones, and those of weight 0.
    """

    row: Any = np.int32(0)
    first: Any = np.int32(0)
    skipped: Any = np.int32(0)

    def after(self, finite: jax.Array, updates: jax.Array, step: jax.Array) -> Guard:
        """Returns the counts after a step.

        A finite step that does not update has weight 0; it neither extends nor ends a row of
        non-finite steps.
        """
        # not `jax.numpy`, whose calls make up a twentieth of the trace of a small step
        row, first, skipped = (
            jnp.asarray(x, jnp.int32) for x in (self.row, self.first, self.skipped)
        )
        bad, kept = (jnp.asarray(lax.bitwise_not(x), jnp.int32) for x in (finite, updates))
        # A step that is not finite has the number of the one before it, also in a row of them.
        return Guard(
            lax.select(updates, jnp.int32(0), lax.add(row, bad)),
            lax.select(finite, first, jnp.asarray(step, jnp.int32)),
            lax.add(skipped, kept),
        )


class Watch:
    """Checks the guard of each step with a delay, so that no step waits for the host.

    A single process checks a step as soon as it has ended, at the latest `LATE` steps after it.
    Several processes check exactly `LATE` steps after it, so that all stop at the same step.
    """

    def __init__(self, most: int | None, describe: Callable[..., str], has_scaler: bool):
        self._most, self._describe = most, describe
        self._fix = (
            "lower the scaler's init_loss_scaling="
            if has_scaler
            else "with float16 pass scaler=gshard.GradScaler()"
        )
        self._seen: deque[tuple[int, Guard, Any, Any]] = deque()
        self._states = 0  # how many that the last step had not returned were given
        self._bad: Any = None  # flags of the first step of a row
        self._last: Any = None  # of the state that the last step returned
        self._checked = 0, 0, 0  # `first`, `row` and `skipped` of the last guard
        self._number = StepNumber()

    def add(self, guard: Guard, after: Guard, flags: Any, scale: Any = None) -> None:
        """Records a step: its guard, not to be donated, and the copy in the new state.

        The flags say which gradients are finite; `describe(flags)` names the others. `scale` is
        that of the loss if it falls after non-finite steps.
        """
        if isinstance(guard.row, core.Tracer):
            return
        self._number.end(guard.skipped)
        self._last = after.row
        if self._most is not None:
            self._seen.append((self._states, guard, flags, scale))

    def look(self, before: Guard, step: Any) -> None:
        """Checks earlier steps, before one starts with a state of the guard and step number given.

        Raises a `NonFiniteError` if `most` steps in a row were not finite, and no lower scale is
        left. The last step need not have returned this state: another step may have, or a function
        of the user's. It may also be an earlier one, to which recorded guards do not belong.
        """
        is_other = before.row is not self._last
        self._states += is_other
        while self._seen and (len(self._seen) >= LATE or self._has_ended(self._seen[0][1])):
            states, guard, flags, scale = self._seen.popleft()
            row = int(guard.row)
            first, skipped = (int(guard.first), int(guard.skipped)) if row else (0, 0)
            was_empty = (first, row) == self._checked[:2] and skipped > self._checked[2]
            if row and not was_empty:  # it may be another try, from the same state
                named = partial(self._describe, flags, everywhere=False)
                self._number.skipped(first, row, named, states == self._states)
                goes_on = first == self._checked[0] and row > self._checked[1] > 0
                self._bad = self._bad if goes_on else flags
            self._checked = first, row, skipped
            if self._most is not None and row >= self._most and self._gives_up(row, scale):
                self._seen.clear()
                if is_other and int(before.row) < row:
                    break  # the user went on with an earlier state
                named = self._describe(self._bad)
                fix, limit = self._fix, "."
                if scale is not None:
                    fix = f"see why a loss scale of {scale} does not help"
                    limit = f", and {_FALLING} times that while the loss scale falls."
                what = f"step {first} had non-finite gradients: those of {named}. This step"
                if row > 1:
                    what = (
                        f"{row} consecutive steps had non-finite gradients, starting at step "
                        f"{first} with those of {named}. These steps"
                    )
                raise NonFiniteError(
                    f"{what} changed nothing. Look at the batches and the loss of "
                    "that step (jax_debug_nans finds the operation), lower the learning rate, or "
                    f"{fix}. max_bad_steps= sets the limit{limit}"
                )
        self._number.begin(step, before.skipped, is_other)

    def _gives_up(self, row: int, scale: Any) -> bool:
        """Whether `row` non-finite steps in a row end the run: the scale has fallen enough."""
        most: Any = self._most
        return scale is None or row >= _FALLING * most or float(scale) <= 1

    def _has_ended(self, guard: Guard) -> bool:
        return jax.process_count() == 1 and guard.row.is_ready()
