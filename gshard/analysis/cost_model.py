"""The cost model: seconds of a train step by the resource that they are spent on.

Sources: the roofline of the scaling book, chapters 1 and 5; the lower bounds of nccl-tests,
`doc/PERFORMANCE.md`, for collectives. Latency is left out: it counts for small models only.

    step = max(compute, memory, wire) + update + all_gather_params + host

Parameters of a layer are all-gathered, and its gradients are reduced, while other layers compute.
The all-gather of the updated parameters and the transfers to and from the host wait for the update.
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
      wire: collectives that overlap with computation.
      update: reading and writing the optimizer state.
      all_gather_params: all-gather of the updated parameters.
      host: fetching offloaded state from the host, and sending it back.
    """

    compute: float
    memory: float
    wire: float
    update: float
    all_gather_params: float
    host: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        overlapped = max(self.compute, self.memory, self.wire)
        return overlapped + self.update + self.all_gather_params + self.host

    @property
    def binding(self) -> str:
        """The bottleneck: the resource of which more makes the step faster."""
        overlapped = max(("compute", "memory", "wire"), key=lambda name: getattr(self, name))
        amounts = {
            overlapped: getattr(self, overlapped),
            "memory of the update": self.update,
            "wire of the updated parameters": self.all_gather_params,
            "link to the host": self.host,
        }
        return max(amounts, key=amounts.__getitem__)

    def as_dict(self) -> dict[str, float | str]:
        """Seconds by resource, of the step, and the bottleneck."""
        return {**dataclasses.asdict(self), "step": self.step, "binding": self.binding}


def bandwidths(target: Target, group: Group) -> tuple[float, float]:
    """Bytes/s that a device sends within its shard group, and between replicas.

    Neighbouring devices are in one shard group. If a group spans several hosts, its devices on one
    host share the network of that host.
    """
    chip = target.chip
    if target.platform == "tpu":
        return 2 * chip.link, 2 * chip.link  # both ways along an axis
    if target.hosts == 1:
        return chip.link, chip.link
    members = min(group.size, target.devices_per_host)
    inside = group.size <= target.devices_per_host
    shard = chip.link if inside else min(chip.link, members * chip.network)
    groups = max(1, target.devices_per_host // group.size)
    return shard, min(chip.link, groups * chip.network)


def cost(
    target: Target,
    group: Group,
    flops: Mapping[str, float],
    traffic: int,
    wire: Mapping[str, int],
    update: int,
    host: int,
) -> Cost:
    """The cost of a step on a mesh with these data axes, from FLOPs by dtype and bytes.

    A device sends `wire` bytes: `shard` within its shard group, `replicas` between replicas, and
    `update` for the updated parameters. The loss and its gradient read and write `traffic` bytes of
    memory, the optimizer `update` bytes; `host` bytes are stored on the host.
    """
    chip = target.chip
    shard, replicas = bandwidths(target, group)
    if group.replicas > 1 and group.size == 1:
        shard = replicas
    seconds = sum(
        count / (COMPUTE_SHARE * (chip.bfloat16 if dtype.endswith("float16") else chip.float32))
        for dtype, count in flops.items()
    )
    stream = MEMORY_SHARE * chip.memory_bandwidth
    return Cost(
        compute=seconds,
        memory=traffic / stream,
        wire=wire.get("shard", 0) / shard + wire.get("replicas", 0) / replicas,
        update=update / stream,
        all_gather_params=wire.get("update", 0) / shard,
        host=2 * host / chip.host_link,
    )
