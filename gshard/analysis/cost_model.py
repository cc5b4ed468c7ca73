"""The cost model: seconds of a train step by the resource that they are spent on.

Sources: the roofline of the scaling book, chapters 1 and 5; the lower bounds of nccl-tests,
`doc/PERFORMANCE.md`, for collectives. Latency is left out: it counts for small models only.

    step = max(compute, memory, wire beside them) + update + publish + host

What is gathered for a layer and scattered or summed of its gradient travels beside the computation
of other layers; what is published and what goes to the host and back waits for the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gshard.analysis.aot.target import Target
from gshard.sharding.mesh import Group

# Shares of a chip's peak that programs reach: products of large matrices 60 to 70 % on GPUs and
# TPUs (scaling book, chapters 1 and 12), streams through memory about 80 %.
COMPUTE_SHARE, MEMORY_SHARE = 0.6, 0.8


@dataclass(frozen=True)
class Cost:
    """Seconds of one step.

    Attributes:
      compute: arithmetic.
      memory: reading and writing activations and parameters.
      wire: collectives that travel beside these.
      update: reading and writing the optimizer's state.
      publish: collectives after the update.
      host: fetching what rests in the host's memory, and sending it back.
    """

    compute: float
    memory: float
    wire: float
    update: float
    all_gather_params: float
    host: float

    @property
    def step(self) -> float:
        """All of it."""
        beside = max(self.compute, self.memory, self.wire)
        return beside + self.update + self.all_gather_params + self.host

    @property
    def binding(self) -> str:
        """The resource that more of would make the step faster, first of all."""
        beside = max(("compute", "memory", "wire"), key=lambda name: getattr(self, name))
        amounts = {
            beside: getattr(self, beside),
            "memory of the update": self.update,
            "wire of publishing": self.all_gather_params,
            "link to the host": self.host,
        }
        return max(amounts, key=lambda name: amounts[name])

    def as_dict(self) -> dict[str, float | str]:
        """Seconds by name, the step, and what binds."""
        return {**dataclasses.asdict(self), "step": self.step, "binding": self.binding}


def bandwidths(target: Target, group: Group) -> tuple[float, float]:
    """Bytes/s that a device sends within its shard group, and to its copies in other groups.

    Neighbours are in one shard group. Where a group spans hosts, its members of one host share the
    network of all of them, ring by ring.
    """
    chip = target.chip
    if target.platform == "tpu":
        return 2 * chip.link, 2 * chip.link  # both ways along an axis
    if target.hosts == 1:
        return chip.link, chip.link
    members = min(group.size, target.devices_per_host)
    inside = group.size <= target.devices_per_host
    shard = chip.link if inside else min(chip.link, members * chip.network)
    of_copies = max(1, target.devices_per_host // group.size)
    copies = min(chip.link, of_copies * chip.network)
    return shard, copies


def cost(
    target: Target,
    group: Group,
    flops: Mapping[str, float],
    traffic: int,
    wire: Mapping[str, int],
    update: int,
    host: int,
) -> Cost:
    """The cost of a step.

    Args:
      target: the machine.
      group: data axes.
      flops: of one device, by dtype of the operands.
      traffic: bytes that it reads and writes of its memory for the loss and its gradient.
      wire: bytes that it sends, for `shard` beside the computation, `copies` beside it to other
        shard groups, and `publish`.
      update: bytes read and written by the optimizer.
      host: bytes at rest on the host.
    """
    chip = target.chip
    shard, copies = bandwidths(target, group)
    if group.replicas > 1 and group.size == 1:
        shard = copies
    seconds = sum(
        count / (COMPUTE_SHARE * (chip.bfloat16 if dtype in _HALF else chip.float32))
        for dtype, count in flops.items()
    )
    stream = MEMORY_SHARE * chip.memory_bandwidth
    return Cost(
        compute=seconds,
        memory=traffic / stream,
        wire=wire.get("shard", 0) / shard + wire.get("copies", 0) / copies,
        update=update / stream,
        all_gather_params=wire.get("update", 0) / shard,
        host=2 * host / chip.host_link,
    )


_HALF = ("bfloat16", "float16")
