"""The options of a step, and the check that a plan supports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.validation import check_integer_field, flag, shown
from gshard.sharding.budget import accumulation, budget, resharding
from gshard.sharding.level import Accumulate
from gshard.sharding.plan import Plan
from gshard.train.comm.buckets import BUCKET_SIZE, END_BUCKET_SIZE
from gshard.train_state.nonfinite import GradScaler, treats_nonfinite, untreated

MAX_BAD_STEPS = 10

_GATHER_LIMIT = 64 * 2**20  # bytes
LossSemantics = Literal["global", "per_micro_batch", "per_device"]


@dataclass(frozen=True)
class StepOptions:
    """How gradients are computed; the names are those of `make_train_step`.

    The defaults are those of the Paddle and PyTorch faces: the loss of each device, averaged.
    """

    has_aux: bool = False
    micro_batches: int = 1
    accumulate: Accumulate = "level"
    bucket_size: int = BUCKET_SIZE
    sync_buffers: bool = False
    reshard_after_forward: bool | int = True
    prefetch: bool = True
    by_examples: bool = False  # a plain loss weighs its number of examples, which differs by call
    end_bucket_size: int = END_BUCKET_SIZE
    loss_semantics: LossSemantics = "per_device"
    gather_limit: int | None = None
    mutable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_semantics(self.loss_semantics)
        if self.gather_limit is not None:
            check_integer_field(self, "gather_limit", 0, " of bytes")
        for name in ("has_aux", "sync_buffers", "prefetch"):
            flag(name, getattr(self, name))
        check_integer_field(self, "micro_batches", 1)
        check_integer_field(self, "bucket_size", 0, " of elements (0: no buckets)")
        check_integer_field(self, "end_bucket_size", 1, " of elements")


@dataclass(frozen=True, eq=False)
class TrainStepOptions(StepOptions):
    """The options of a train step; the names are those of `make_train_step`."""

    rng: jax.Array | None = None
    scaler: GradScaler | None = None
    skip_nonfinite: bool | None = None
    max_bad_steps: int | None = MAX_BAD_STEPS
    post_update: Callable[..., Any] | None = None
    donate: bool = True
    check_loss: bool = True
    check_replicas: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise GShardError(
                f"make_train_step: scaler={shown(self.scaler)} is not a gshard.GradScaler. Pass "
                "one, such as scaler=gshard.GradScaler()."
            )
        if self.skip_nonfinite is not None:
            flag("skip_nonfinite", self.skip_nonfinite)
        if self.max_bad_steps is not None:
            check_integer_field(self, "max_bad_steps", 1, " (None: never)")
        if self.post_update is not None and not callable(self.post_update):
            raise GShardError(
                f"post_update={shown(self.post_update)} is not a function. Linen: "
                "post_update(state) -> state; NNX: post_update(model, optimizer), in place."
            )
        flag("donate", self.donate)
        flag("check_loss", self.check_loss)
        if self.check_replicas is not None:
            check_integer_field(self, "check_replicas", 1, " of steps (None: never)")


def skips_nonfinite(plan: Plan, options: TrainStepOptions) -> bool:
    """Whether the step skips non-finite gradients, or hands them to the optimizer.

    Raises:
      GShardError: an option has no effect without skipped steps.
    """
    scaler = options.scaler is not None and options.scaler.enable
    skips = options.skip_nonfinite
    if skips is None:
        skips = scaler or not treats_nonfinite(plan.opt_state)
        parameters = len(jax.tree.leaves(plan.grads))
        if not skips and (where := untreated(plan.opt_state, parameters)):
            warn(
                f"the optimizer handles non-finite gradients itself {where}: a NaN there ruins "
                "those parameters for good. Pass skip_nonfinite=True, or wrap the whole optimizer "
                "in optax.apply_if_finite."
            )
    if skips:
        return True
    if scaler:
        raise GShardError(
            "skip_nonfinite=False with scaler=: a loss scale is found by skipping the steps that "
            "overflow. Leave skip_nonfinite= out, or pass no scaler."
        )
    if options.max_bad_steps not in (None, MAX_BAD_STEPS):
        by_default = options.skip_nonfinite is None
        why = "handles such gradients itself" if by_default else "gets such gradients"
        raise GShardError(
            f"max_bad_steps={options.max_bad_steps} counts skipped steps, and no step with a "
            f"non-finite gradient is skipped: the optimizer {why}. Leave max_bad_steps= out, or "
            "pass skip_nonfinite=True."
        )
    return False


def _check_semantics(semantics: object) -> None:
    """Refuses an unknown `loss_semantics=`."""
    known = get_args(LossSemantics)
    if semantics not in known:
        raise GShardError(
            f"loss_semantics={shown(semantics)} is unknown.{did_you_mean(semantics, known)} Choose "
            "'global' (the loss of the whole batch, as on one device), 'per_micro_batch' (the mean "
            "of the losses of micro-batches over all devices) or 'per_device' (the mean of each "
            "device's own loss)."
        )


def most_gathered(plan: Plan, given: int | None) -> int:
    """The bytes that one operation of a global loss may all-gather; `given` is `gather_limit=`."""
    return max(_GATHER_LIMIT, budget(plan).wire_bytes // 100) if given is None else given


def check_gather_limit(plan: Plan, options: StepOptions) -> None:
    """Warns of a limit that has no effect."""
    alone = options.loss_semantics == "per_device" and plan.group.sequence == 1
    if options.gather_limit is not None and alone:
        warn(
            "gather_limit= changes nothing with loss_semantics='per_device': gshard adds no "
            "collective to what each device computes. Leave it out."
        )


def check_options(plan: Plan, options: StepOptions, sync: bool = True) -> None:
    """Refuses options that this plan does not support, and warns of those without effect."""
    accumulation(plan, options.micro_batches, options.accumulate, sync)
    resharding(plan, options.reshard_after_forward)
    scaler, is_step = getattr(options, "scaler", None), isinstance(options, TrainStepOptions)
    half = [x.path for x in jax.tree.leaves(plan.params) if x.dtype == jnp.float16]
    alone = [path or "the array" for path in half if path not in plan.master]
    by_user = scaler is not None and not scaler.enable  # who scales the loss, and knows why
    if alone and is_step and not by_user:
        warn(
            f"parameters are float16 without a float32 copy ({some(alone, 3)}): gradients below "
            "6e-8 and small updates become 0, with a loss scale too. Give shard_train_state "
            "float32 parameters and precision='float16', and the step scaler=gshard.GradScaler(). "
            "If it is meant, pass scaler=gshard.GradScaler(enable=False)."
        )
    elif half and scaler is None and is_step:
        warn(
            "parameters are float16 and scaler is None: small gradients become 0. Pass "
            "scaler=gshard.GradScaler(), or scaler=gshard.GradScaler(enable=False) if the loss is "
            "scaled already."
        )
    sent = {x.scattered_as.dtype for x in jax.tree.leaves(plan.grads) if x.scattered_as}
    if scaler is not None and scaler.enable and "int4" in sent:
        raise GShardError(
            "scaler= with scatter_dtype='int4': a loss scale that grows until gradients overflow "
            "makes the largest entry of a block an outlier, and with 4 bits the others are rounded "
            "to zero. Use scatter_dtype='int8', or precision='bfloat16' without a scaler."
        )
    if options.sync_buffers and options.loss_semantics != "per_device":
        warn(
            f"sync_buffers=True changes nothing with loss_semantics={options.loss_semantics!r}: "
            "what the loss returns as new state is that of the whole batch, on every device. Leave "
            "it out, or pass loss_semantics='per_device'."
        )
    elif options.sync_buffers and not options.mutable and "model" not in plan.kind.arguments:
        warn(
            "sync_buffers=True changes nothing: the loss returns no new state. Leave it out, or "
            "name the state that the loss changes with mutable=."
        )
    check_gather_limit(plan, options)
    if plan.gathers:
        return
    why = "on one device" if plan.group.size == 1 else f"at level {plan.level.name!r}"
    for name, default in (("reshard_after_forward", True), ("prefetch", True)):
        value = getattr(options, name)
        if value is not default:
            warn(
                f"{name}={value} changes nothing {why}, where no parameter is sharded. Leave it "
                "out, or use level 'p_g_os' on several devices."
            )
