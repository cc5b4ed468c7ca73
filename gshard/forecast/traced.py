"""What a step of a setup takes, from its trace: activations too, and what it computes and sends."""

from __future__ import annotations

from typing import Any

from gshard.errors import GShardError
from gshard.footprint.footprint import Footprint, footprint, trace_step
from gshard.forecast.choices import Choices
from gshard.forecast.setup import Setup, batch_of, step_of
from gshard.plan import Plan


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

    Raises:
      GShardError: the loss cannot be traced with this state and batch.
    """
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
