"""The cost model: seconds of a train step by the resource that they are spent on.

Sources: the roofline of the scaling book, chapters 1 and 5; the lower bounds of nccl-tests,
`doc/PERFORMANCE.md`, for collectives.

    step = max(compute + memory, wire) + starts + update + all_gather_params + host

A device runs one operation after another, and most of them either compute or wait for memory: on
one H200 three steps took 0.87 to 1.30 of this sum, and 1.4 to 1.7 of the larger of the two.
Parameters of a layer are all-gathered, and its gradients are reduced, while other layers compute.
The all-gather of the updated parameters and the transfers to and from the host wait for the update.
Every collective first waits for all devices of its group; computation is assumed not to overlap
this wait. A virtual CPU device computes and communicates in the same threads: nothing overlaps, and
its step is the sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from gshard.analysis.aot.target import Target
from gshard.analysis.calibration import Calibration
from gshard.analysis.memory.program import FREE, Op, TracedProgram
from gshard.sequence.ring import EVEN

# Shares of a chip's peak that programs reach: products of large matrices 60 to 70 % on GPUs and
# TPUs (scaling book, chapters 1 and 12), streams through memory about 80 %.
COMPUTE_SHARE, MEMORY_SHARE = 0.6, 0.8
# Seconds that a collective takes however little it sends: the launch of a kernel and a round of
# messages on one host (nccl-tests: 10 to 40 us for 8 bytes on 8 GPUs); with several nodes, as much
# again for the network.
START, START_OF_NODES = 20e-6, 20e-6


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
      starts: what collectives take however little they send.
      overlaps: whether collectives overlap with computation and memory traffic.
    """

    compute: float
    memory: float
    wire: float
    update: float
    all_gather_params: float
    host: float
    starts: float = 0.0
    overlaps: bool = True

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        busy = self.compute + self.memory
        overlapped = max(busy, self.wire) if self.overlaps else busy + self.wire
        return overlapped + self.starts + self.update + self.all_gather_params + self.host

    @property
    def binding(self) -> str:
        """The bottleneck: the resource of which more makes the step faster."""
        if not self.overlaps:  # everything is waited for, whatever it is part of
            amounts = {
                "compute": self.compute,
                "memory": self.memory + self.update,
                "wire": self.wire + self.all_gather_params,
                "starts of collectives": self.starts,
            }
            return max(amounts, key=amounts.__getitem__)
        if self.wire > self.compute + self.memory:
            amounts = {"wire": self.wire, "memory of the update": self.update}
        else:
            amounts = {"compute": self.compute, "memory": self.memory + self.update}
        amounts |= {
            "wire of the updated parameters": self.all_gather_params,
            "link to the host": self.host,
            "starts of collectives": self.starts,
        }
        return max(amounts, key=amounts.__getitem__)

    def as_dict(self, base: float = 1.0) -> dict[str, float | str]:
        """Seconds by resource and of the step, in units of `base`, and the bottleneck."""
        seconds = {**dataclasses.asdict(self), "step": self.step}
        del seconds["overlaps"]
        return {**{name: x / base for name, x in seconds.items()}, "binding": self.binding}


def seconds_to_send(
    target: Target, sent: int, network: int = 0, measured: Calibration | None = None
) -> float:
    """Seconds that a device takes to send bytes, of which `network` go to other nodes.

    The links within a node carry the rest at the same time; the slower of the two decides.
    """
    chip = target.chip
    if measured is not None and measured.link is not None:
        return sent / measured.link
    # A TPU sends both ways along an axis.
    link = 2 * chip.link if target.platform == "tpu" else chip.link
    return max((sent - network) / link, network / chip.network)


def cost(
    target: Target,
    flops: Mapping[str, float],
    traffic: int,
    wire: float,
    all_gather_params: float,
    update: int,
    host: int,
    starts: int = 0,
    starts_of_nodes: int = 0,
    measured: Calibration | None = None,
) -> Cost:
    """The cost of a step, from FLOPs by dtype, bytes, and seconds of communication.

    `wire` are the seconds of collectives that overlap with computation, `all_gather_params` those
    of the updated parameters. The loss and its gradient read and write `traffic` bytes of memory,
    the optimizer `update` bytes; `host` bytes are stored on the host. A step executes `starts`
    collectives, of which `starts_of_nodes` span several nodes. Rates are `measured`, or those of
    the target's chip.
    """
    chip = target.chip
    if measured is None:
        half, single = COMPUTE_SHARE * chip.bfloat16, COMPUTE_SHARE * chip.float32
        stream, start = MEMORY_SHARE * chip.memory_bandwidth, START
    else:
        half, single = measured.bfloat16_flops, measured.float32_flops
        stream, start = measured.memory_bandwidth, measured.collective_start or START
    return Cost(
        compute=sum(
            count / (single if jnp.dtype(dtype).itemsize > 2 else half)
            for dtype, count in flops.items()
        ),
        memory=traffic / stream,
        wire=wire,
        update=update / stream,
        all_gather_params=all_gather_params,
        host=2 * host / chip.host_link,
        starts=starts * start + starts_of_nodes * START_OF_NODES,
        overlaps=target.platform != "cpu",
    )


def flops_of(program: TracedProgram, recomputed: bool = True) -> dict[str, float]:
    """Counts the FLOPs of matrix products and convolutions: two for each multiply-add.

    A loop body counts as often as it runs, or once if that is unknown; a condition counts its most
    expensive branch. Zeros that pad or dilate the input of a convolution are multiplied too. What
    `jax.checkpoint` computes a second time counts if `recomputed` is true; if not, hops of
    attention that some devices of a sequence axis skip count for the others alone.

    Returns:
      FLOPs by name of the dtype that is multiplied.
    """
    found: dict[str, float] = defaultdict(float)
    for op in program.ops:
        if not recomputed and "rematted_computation" in op.where:
            continue
        if op.bodies:
            bodies = [flops_of(body, recomputed) for body in op.bodies]
            if not recomputed and op.name == "cond" and EVEN in op.where:
                taken, times = bodies, op.trips / len(bodies)
            else:
                taken, times = [max(bodies, key=lambda body: sum(body.values()))], op.trips
            for dtype, count in (pair for body in taken for pair in body.items()):
                found[dtype] += times * count
        elif count := flops_of_op(op, program):
            found[str(program.values[op.ins[0]].dtype)] += count
    return dict(found)


def flops_of_op(op: Op, program: TracedProgram) -> float:
    """Returns the FLOPs of a matrix product or a convolution; 0 for any other operation."""
    names = ("dot_general", "ragged_dot_general", "conv_general_dilated")
    if op.name not in names or FREE in op.ins[:2]:
        return 0
    left, right, out = (program.values[i] for i in (*op.ins[:2], op.outs[0]))
    if op.name == "dot_general":
        (dims, _), _ = op.params["dimension_numbers"]
        each = math.prod(left.shape[d] for d in dims)
    elif op.name == "ragged_dot_general":  # every row is multiplied by the matrix of its group
        of = op.params["ragged_dot_dimension_numbers"]
        (_, summed), (_, batch) = of.dot_dimension_numbers
        once = {*summed, *batch, *of.rhs_group_dimensions}
        return 2.0 * left.size * math.prod(n for d, n in enumerate(right.shape) if d not in once)
    else:  # the kernel may still have its shape from before a reshape
        each = right.size // max(1, out.shape[op.params["dimension_numbers"].out_spec[1]])
    return 2.0 * out.size * each
