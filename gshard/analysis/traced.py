"""What a step of a setup takes, from its trace: activations too, and what it computes and sends."""

from __future__ import annotations

import dataclasses
from typing import Any

from gshard._util.errors import GShardError
from gshard.analysis.choices import Choices
from gshard.analysis.memory.footprint import Footprint, footprint, trace_step
from gshard.analysis.setup import Setup, batch_of, divided, step_of
from gshard.sharding.plan import Plan


def footprint_of(
    setup: Setup, state: Any, plan: Plan, choices: Choices, platform: str
) -> Footprint:
    """The footprint of one step on one device.

    Args:
      setup: with a loss and a batch.
      state: divided by `plan`, abstract.
      plan: of an abstract mesh too.
      choices: of the step.
      platform: `cpu`, `gpu` or `tpu`: compilers fuse and order differently.

    Returns:
      Estimates; where the state rests with the host a rough one, of the same step on the device.

    Raises:
      GShardError: the loss cannot be traced with this state and batch.
    """
    if choices.offload:
        return _with_host(setup, plan, choices, platform)
    step = step_of(setup, plan, choices)
    try:
        traced = trace_step(step, state, batch_of(setup, plan, choices))
    except GShardError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise GShardError(
            f"the loss cannot be traced with this state and batch: {type(error).__name__}: "
            f"{''.join(first)}"
        ) from error
    return footprint(traced, plan, platform)


def _with_host(setup: Setup, plan: Plan, choices: Choices, platform: str) -> Footprint:
    """That of the same step on the device, less what rests with the host, and what is fetched.

    An update has one group of arrays on the device and the next on its way.
    """
    near = dataclasses.replace(choices, offload=False)
    state, near_plan = divided(setup, plan.mesh, plan.level.name, near)
    seen = footprint_of(setup, state, near_plan, near, platform)
    away, window = plan.bytes_per_device["host"], 2 * max(plan.fetched_at_once, default=0)
    return dataclasses.replace(
        seen,
        arguments=seen.arguments - away,
        temporaries=seen.temporaries + window,
        peak=seen.peak - away + window,
    )
