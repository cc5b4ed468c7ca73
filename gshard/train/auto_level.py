"""`level="auto"`: the fastest level whose state fits the devices at hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from gshard._util.chips import CHIPS, Chip, chip_of, memory_of
from gshard._util.errors import GShardError, warn
from gshard._util.units import bytes_of
from gshard.sharding.budget import Budget, budget, largest_layer
from gshard.sharding.level import LEVELS, Level
from gshard.sharding.plan import Plan

# Of a device's memory for the state and gradients. What activations take is not known without a
# loss; `gshard advise` knows it.
SHARE = 0.7
_PREFERRED = ("os", "os_g", "dp", "p_g_os")  # of equally fast ones


def choose_plan(plan_at: Callable[[Level], Plan], mesh: Mesh | AbstractMesh) -> Plan:
    """The plan of the level that spends least on sending and updating, of those that fit.

    Args:
      plan_at: the plan of a level.
      mesh: of real devices.

    Raises:
      GShardError: no device says how much memory it has.
    """
    if isinstance(mesh, AbstractMesh):
        raise GShardError(
            "level='auto' looks at the memory of the devices, and an AbstractMesh has none. Name "
            "the level; gshard.forecast and gshard advise show what each one takes."
        )
    sizes = [memory_of(device) for device in mesh.local_devices]
    if not sizes or None in sizes:
        raise GShardError(
            f"level='auto': {mesh.local_devices[0]} does not say how much memory it has. Name the "
            "level: 'os', 'os_g' or 'p_g_os'."
        )
    least_here = min(size for size in sizes if size is not None)
    if jax.process_count() > 1:  # all are to choose the same
        least_here = np.min(multihost_utils.process_allgather(np.float64(least_here)))
    memory = int(SHARE * least_here)
    plans = {name: plan_at(level) for name, level in LEVELS.items()}
    found = {name: budget(plan) for name, plan in plans.items()}
    needs = {name: _bytes_of_a_step(plan, found[name]) for name, plan in plans.items()}
    fitting = [name for name in LEVELS if needs[name] <= memory]
    if fitting:
        chip = chip_of(mesh.local_devices[0]) or CHIPS["h100"]  # the order is the same on others
        fitting.sort(key=_PREFERRED.index)
        return plans[min(fitting, key=lambda name: _seconds(found[name], chip))]
    least = min(needs, key=lambda name: needs[name])
    warn(
        f"level='auto': even at {least!r} the state and gradients take "
        f"{bytes_of(needs[least])} on a device, more than {bytes_of(memory)} ({SHARE:.0%} of "
        f"its memory). Use more devices, or offload=True."
    )
    return plans[least]


def _bytes_of_a_step(plan: Plan, budget: Budget) -> int:
    """What a step needs on one device besides its batch and activations."""
    step = sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
    return sum(budget.resident.values()) + step + largest_layer(plan)


def _seconds(budget: Budget, chip: Chip) -> float:
    """Time for what levels differ in: the wire, the update, the link to the host; to two digits.

    The terms of `gshard.analysis.cost_model` that do not depend on the loss.
    """
    host = sum(budget.host.values())
    wire = budget.wire_bytes / chip.link
    update = 2 * (budget.resident["optimizer"] + host) / chip.memory_bandwidth
    return float(f"{wire + update + 2 * host / chip.host_link:.2g}")
