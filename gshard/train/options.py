"""Options of a step for its gradients, and whether a plan can follow them."""

from __future__ import annotations

from dataclasses import dataclass

from gshard._util.errors import warn
from gshard._util.validation import check_integer, flag
from gshard.sharding.budget import accumulation, resharding
from gshard.sharding.plan import Plan
from gshard.train.comm.buckets import BUCKET_SIZE, END_BUCKET_SIZE


@dataclass(frozen=True)
class StepOptions:
    """How gradients are made; the same names as in `make_train_step`.

    `by_examples`: a loss that is not `Weighted` weighs as much as its number of examples, since
    other calls may have another number.
    """

    has_aux: bool = False
    micro_batches: int = 1
    accumulate: str = "level"
    bucket_size: int = BUCKET_SIZE
    sync_buffers: bool = False
    reshard_after_forward: bool | int = True
    prefetch: bool = True
    by_examples: bool = False
    end_bucket_size: int = END_BUCKET_SIZE

    def __post_init__(self) -> None:
        for name in ("has_aux", "sync_buffers", "prefetch"):
            flag(name, getattr(self, name))
        check_integer("bucket_size", self.bucket_size, 0, " of elements (0: no buckets)")
        check_integer("end_bucket_size", self.end_bucket_size, 1, " of elements")


def check_options(plan: Plan, options: StepOptions, sync: bool = True) -> None:
    """Refuses options that this plan cannot follow, and names one that changes nothing."""
    accumulation(plan, options.micro_batches, options.accumulate, sync)
    resharding(plan, options.reshard_after_forward)
    if plan.gathers:
        return
    why = "on one device" if plan.group.size == 1 else f"at level {plan.level.name!r}"
    for name, default in (("reshard_after_forward", True), ("prefetch", True)):
        value = getattr(options, name)
        if value is not default:
            warn(
                f"{name}={value} changes nothing {why}, where no parameter is divided. Leave it "
                "out, or use level 'p_g_os' on several devices."
            )
