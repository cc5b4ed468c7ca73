"""Chooses the level for `level="auto"`, by memory and by a model of time."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh

from gshard._util.chips import CHIPS, Chip, chip_of, memory_of
from gshard._util.errors import GShardError, warn
from gshard._util.text import bytes_of
from gshard.distributed.agree import all_gather_text, check_same_call
from gshard.sharding.budget import Budget, budget, largest_layer
from gshard.sharding.level import LEVELS, Level
from gshard.sharding.plan import Plan

# The share of a device's memory for the state and gradients. The memory of activations is not known
# without a loss; `gshard advise` knows it.
SHARE = 0.7
_PREFERRED = ("os", "os_g", "dp", "p_g_os")  # of equally fast ones


def choose_plan(plan_at: Callable[[Level], Plan], mesh: Mesh | AbstractMesh) -> Plan:
    """Returns the plan of the fitting level that spends least time on communication and updates."""
    if isinstance(mesh, AbstractMesh):
        raise GShardError(
            "level='auto' depends on the memory of the devices, and an AbstractMesh has none. "
            "Choose a level; gshard.forecast and gshard advise show what each one needs."
        )
    sizes = [size for device in mesh.local_devices if (size := memory_of(device)) is not None]
    if not sizes or len(sizes) < len(mesh.local_devices):
        raise GShardError(
            f"level='auto': {mesh.local_devices[0]} does not report how much memory it has. "
            "Choose a level: 'os', 'os_g' or 'p_g_os'."
        )
    least_here = min(sizes)
    # All processes must choose the same level.
    texts = all_gather_text(f"auto\n{least_here}", mesh, what="shard_train_state")
    texts = check_same_call(texts, "auto")
    least_here = min(map(int, texts.values()))
    memory = int(SHARE * least_here)
    plans = {name: plan_at(level) for name, level in LEVELS.items()}
    found = {name: budget(plan) for name, plan in plans.items()}
    needs = {  # of a step, without batch and activations
        name: sum(found[name].resident.values())
        + sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
        + largest_layer(plan)
        for name, plan in plans.items()
    }
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


def _seconds(budget: Budget, chip: Chip) -> float:
    """Estimates what differs by level, the terms of the cost model that no loss is needed for."""
    host = sum(budget.host.values())
    wire = budget.wire_bytes / chip.link
    update = 2 * (budget.resident["optimizer"] + host) / chip.memory_bandwidth
    return float(f"{wire + update + 2 * host / chip.host_link:.2g}")
