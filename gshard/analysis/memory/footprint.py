"""Estimates what one device needs, computes and transfers in a train step from its trace alone.

Nothing is compiled. The peak is what the step is given and what it makes on the way; results take
over the memory of a donated state. docs/development/planner-accuracy.md says how far off it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.jaxpr import COLLECTIVES
from gshard._util.validation import shown
from gshard.analysis.cost_model import flops_of
from gshard.analysis.memory.fusion import fused
from gshard.analysis.memory.liveness import peak_of
from gshard.analysis.memory.opening import program_of
from gshard.analysis.memory.program import (
    FREE,
    NEW_CPU,
    RESHAPED,
    Kernel,
    Op,
    TracedProgram,
)
from gshard.sharding.nodes import Nodes, nodes_of, sent_share
from gshard.sharding.plan import Plan
from gshard.train.train_step import TrainStep

_PARTS = ("dynamic_slice", "slice", "gather", *RESHAPED)  # read only what they give


@dataclass(frozen=True)
class Exchange:
    """The collectives of one kind, dtype and group size in a step, on one device.

    All of them send the same share of their payload to other nodes.

    Attributes:
      kind: HLO's name, such as `reduce-scatter`.
      dtype: the dtype in which the compiler transfers the data.
      group_size: number of devices in one group.
      scalar: whether each transfers one element, such as a norm or a loss.
      of_update: whether they all-gather the updated parameters.
      count: number of executions.
      elements: outputs of all-gathers, inputs of everything else, as `gshard.audit` counts.
      payload_bytes: the elements in bytes.
      wire_bytes: bytes that the device sends, by the ring algorithms.
      network_bytes: how many of these go to other nodes: the mean over the devices of a node.
    """

    kind: str
    dtype: str
    group_size: int
    scalar: bool
    of_update: bool
    count: int
    elements: int
    payload_bytes: int
    wire_bytes: int
    network_bytes: int


def traffic_of(program: TracedProgram, platform: str) -> int:
    """Returns the bytes that a program's kernels read from and write to the device's memory."""
    whole = fused(program, platform)
    program = whole.program
    reads: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        for i in op.ins:
            reads[i].append(op)

    def read(i: int) -> int:
        size, users = program.values[i].bytes, reads[i]
        if users and all(op.name in _PARTS[:3] for op in users):
            return min(size, max(program.values[op.outs[0]].bytes for op in users))
        return size

    def written(kernel: Kernel) -> int:
        op = kernel.op
        part = {"stack_slice": 0, "dynamic_update_slice": 1}.get(op.name)
        if part is not None and op.ins[part] != FREE:
            return program.values[op.ins[part]].bytes
        return sum(program.values[i].bytes for i in kernel.writes)

    found = 0
    for kernel in whole.kernels:
        bodies = kernel.op.bodies
        if bodies:
            found += kernel.op.trips * max(traffic_of(body, platform) for body in bodies)
        else:
            found += written(kernel) + sum(map(read, kernel.reads))
    return found


def exchanges_of(program: TracedProgram, nodes: Nodes, wide: bool) -> tuple[Exchange, ...]:
    """Returns the collectives that a program contains, over more than one device.

    Args:
      program: of one device.
      nodes: those of its mesh.
      wide: whether the compiler transfers 16-bit values as float32.
    """
    rows: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])

    def sent(body: TracedProgram) -> int:
        return sum(row.wire_bytes for row in exchanges_of(body, nodes, wide))

    for op, where, times in _collectives(program, 1, sent):
        kind, (group, share) = COLLECTIVES[op.name], _group_of(op, nodes)
        moved = op.outs if kind == "all-gather" else op.ins
        if kind == "ragged-all-to-all":  # one side has room for the rows of all devices
            moved = [min(op.ins[0], op.outs[0], key=lambda i, of=where.values: of[i].size)]
        for i in moved:
            if group == 1 or i == FREE:
                continue
            value = where.values[i]
            narrow = wide and str(value.dtype) in ("bfloat16", "float16")
            dtype, width = ("float32", 4) if narrow else (str(value.dtype), value.dtype.itemsize)
            row = rows[kind, dtype, group, value.size == 1, "gshard/update" in op.where, share]
            row[0] += times
            row[1] += times * value.size
            row[2] += times * value.size * width
    found = []
    for key, (count, elements, payload) in sorted(rows.items(), key=lambda row: -row[1][2]):
        kind, dtype, group, scalar, of_update, share = key
        wire, network = int(sent_share(kind, group) * payload), math.ceil(share * payload)
        amounts = count, elements, payload, wire, network
        found.append(Exchange(kind, dtype, group, scalar, of_update, *amounts))
    return tuple(found)


def _collectives(
    program: TracedProgram, times: int, sent: Callable[[TracedProgram], int]
) -> Iterator[tuple[Op, TracedProgram, int]]:
    """Yields each collective, the program that contains it, and how often it runs.

    Of branches these are the collectives of the one for which `sent` gives most.
    """
    for op in program.ops:
        if op.name in COLLECTIVES:
            yield op, program, times
        if op.bodies:
            body = max(op.bodies, key=sent) if len(op.bodies) > 1 else op.bodies[0]
            yield from _collectives(body, times * op.trips, sent)


def _group_of(op: Op, nodes: Nodes) -> tuple[int, Fraction]:
    """Returns the size of a collective's groups, and the share of its payload between nodes."""
    names = op.params.get("axes", op.params.get("axis_name"))
    names = (names,) if isinstance(names, str) else tuple(names)
    parts: Any = op.params.get("axis_index_groups")
    sizes = dict(nodes.axes)
    group = math.prod(sizes[name] for name in names) if parts is None else len(parts[0])
    if op.name == "ppermute":
        parts = op.params["perm"]
    if parts is not None:
        parts = tuple(map(tuple, parts))
    return group, nodes.network_share_over(COLLECTIVES[op.name], names, parts)


PLATFORMS = ("cpu", "gpu", "tpu")
MARGIN = 1.2  # estimates are +-20 %: a plan fits if this times its estimate does


@dataclass(frozen=True)
class Footprint:
    """The memory, arithmetic and communication of one step on one device.

    Attributes:
      arguments: bytes of the state and the batch.
      temporaries: bytes of the largest sum of temporaries that are live together.
      peak: bytes of the two together and of the results that take over no argument's memory.
      flops: FLOPs of matrix products and convolutions, by dtype (`cost_model.flops_of`).
      traffic: bytes that kernels read from the device's memory and write to it, for a roofline.
      collectives: those written in the step. What XLA adds to an update in the global view, such as
        for an optimizer's matrix products, is not among them. A loop of unknown length counts once,
        and of branches the one that sends most.
    """

    arguments: int
    temporaries: int
    peak: int
    flops: dict[str, float]
    traffic: int
    collectives: tuple[Exchange, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that the device sends in the collectives, without scalars such as the loss."""
        return sum(row.wire_bytes for row in self.collectives if not row.scalar)

    @property
    def network_bytes(self) -> int:
        """How many of these bytes go to other nodes."""
        return sum(row.network_bytes for row in self.collectives if not row.scalar)


def trace_step(step: TrainStep, state: Any, batch: Any) -> jax.stages.Traced:
    """Traces a step for a state and a batch, concrete or abstract.

    No device is needed: a plan of an `AbstractMesh` will do, with an abstract batch.
    """
    return step.trace(*step.arguments(state, batch))


def footprint(
    traced: jax.stages.Traced, plan: Plan, platform: str, devices_per_node: int | None = None
) -> Footprint:
    """Estimates what one device needs for a step.

    Args:
      traced: the result of `trace_step`.
      plan: the plan of the step.
      platform: `cpu`, `gpu` or `tpu`, whose compiler is modeled; a TPU is taken for a GPU.
      devices_per_node: as in `gshard.budget`.

    Raises:
      GShardError: for another platform.
    """
    if platform not in PLATFORMS:
        raise GShardError(f"platform={shown(platform)} is none of {', '.join(PLATFORMS)}.")
    program = device_program(traced, plan, platform)
    arguments = sum(program.values[i].bytes for i in program.inputs)
    temporaries = peak_of(program, platform)
    return Footprint(
        arguments,
        temporaries,
        arguments + temporaries,
        flops_of(program),
        traffic_of(program, platform),
        exchanges_of(program, nodes_of(plan.mesh, devices_per_node), wide=platform == "cpu"),
    )


def device_program(traced: jax.stages.Traced, plan: Plan, platform: str) -> TracedProgram:
    """Returns a traced step as the program of one device."""
    (leaves, batch, rng, _), _ = traced.in_avals  # pyright: ignore[reportAttributeAccessIssue]
    shardings: list[Any] = [x.sharding for x in jax.tree.leaves(plan.abstract_components())]
    shardings += [plan.sharding().update(spec=x) for x in jax.tree.leaves(plan.batch_specs(batch))]
    shardings += [None for _ in jax.tree.leaves(rng)]
    program = program_of(traced.jaxpr, shardings, platform != "cpu" or NEW_CPU, platform)
    if 0 in traced.donate_argnums:  # pyright: ignore[reportAttributeAccessIssue]
        program.kept = [(k, k) for k in range(len(leaves))]
    return program
