"""`level="auto"`: chooses the fastest level whose state fits the memory of the devices."""

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

# The share of a device's memory for the state and gradients. The memory of activations is not known
# without a loss; `gshard advise` knows it.
SHARE = 0.7
_PREFERRED = ("os", "os_g", "dp", "p_g_os")  # of equally fast ones


def choose_plan(plan_at: Callable[[Level], Plan], mesh: Mesh | AbstractMesh) -> Plan:
    """Returns the plan of the fitting level that spends least time on communication and updates.

    Args:
      plan_at: returns the plan of a level.
      mesh: a mesh of real devices.

    Raises:
      GShardError: the mesh is abstract, or a device does not report its memory.
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
    if jax.process_count() > 1:  # all processes must choose the same level
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
    """Returns the bytes that a step needs on one device in addition to batch and activations."""
    step = sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
    return sum(budget.resident.values()) + step + largest_layer(plan)


def _seconds(budget: Budget, chip: Chip) -> float:
    """Estimates the time in which levels differ: network, update and host link, to two digits.

    These are the terms of `gshard.analysis.cost_model` that do not depend on the loss.
    """
    host = sum(budget.host.values())
    wire = budget.wire_bytes / chip.link
    update = 2 * (budget.resident["optimizer"] + host) / chip.memory_bandwidth
    return float(f"{wire + update + 2 * host / chip.host_link:.2g}")
