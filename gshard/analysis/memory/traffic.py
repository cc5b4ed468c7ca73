"""What a program computes and moves: operations, bytes of device memory, and collectives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gshard.analysis.memory.combine import Kernel
from gshard.analysis.memory.fusion import fused
from gshard.analysis.memory.program import COLLECTIVES, FREE, RESHAPED, Op, TracedProgram

_PARTS = ("dynamic_slice", "slice", "gather", *RESHAPED)  # read only what they give


@dataclass(frozen=True)
class Exchange:
    """All collectives of one kind, dtype and group size in a step, on one device.

    Attributes:
      kind: HLO's name, such as `reduce-scatter`.
      dtype: as the compiler moves it.
      group_size: devices that exchange.
      scalar: each moves one element: a norm, a loss.
      count: executions.
      elements: outputs of all-gathers, inputs of everything else, as `gshard.audit` counts.
      payload_bytes: the same in bytes.
      wire_bytes: what the device sends, by the ring algorithms.
    """

    kind: str
    dtype: str
    group_size: int
    scalar: bool
    count: int
    elements: int
    payload_bytes: int
    wire_bytes: int


def flops_of(program: TracedProgram) -> dict[str, float]:
    """Of matrix products and convolutions, two for each multiplication with its addition.

    A loop counts as often as it runs, one of unknown length once; of the branches of a condition
    the dearest. Zeros that pad or dilate what a convolution reads are multiplied too.

    Returns:
      The number by name of the dtype that is multiplied.
    """
    found: dict[str, float] = defaultdict(float)
    for op in program.ops:
        if op.bodies:
            dearest = max(map(flops_of, op.bodies), key=lambda body: sum(body.values()))
            for dtype, count in dearest.items():
                found[dtype] += op.trips * count
        elif count := flops_of_op(op, program):
            found[str(program.values[op.ins[0]].dtype)] += count
    return dict(found)


def flops_of_op(op: Op, program: TracedProgram) -> float:
    """Of one matrix product or convolution, or of all parts of one that is split; else 0."""
    if op.name not in ("dot_general", "conv_general_dilated") or FREE in op.ins[:2]:
        return 0
    left, right, out = (program.values[i] for i in (*op.ins[:2], op.outs[0]))
    if op.name == "dot_general":
        (dims, _), _ = op.params["dimension_numbers"]
        each = math.prod(left.shape[d] for d in dims)
    else:  # the kernel may lie here as it was before a reshape
        each = right.size // max(1, out.shape[op.params["dimension_numbers"].out_spec[1]])
    return 2.0 * out.size * each / op.params.get("parts", 1)


def traffic_of(program: TracedProgram, platform: str) -> int:
    """Bytes that the kernels of a program read from the device's memory and write to it."""
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


def exchanges_of(
    program: TracedProgram, mesh: Mapping[str, int], wide: bool
) -> tuple[Exchange, ...]:
    """The collectives that are written in a program, of more than one device.

    Args:
      program: of one device.
      mesh: sizes of the axes by name.
      wide: the compiler moves what has 16 bits as float32.
    """
    rows: dict[tuple[str, str, int, bool], list[int]] = defaultdict(lambda: [0, 0, 0])
    for op, where, times in _collectives(program, 1):
        kind, group = COLLECTIVES[op.name], _group_size(op, mesh)
        for i in op.outs if kind == "all-gather" else op.ins:
            if group == 1 or i == FREE:
                continue
            value = where.values[i]
            narrow = wide and str(value.dtype) in ("bfloat16", "float16")
            dtype, width = ("float32", 4) if narrow else (str(value.dtype), value.dtype.itemsize)
            row = rows[kind, dtype, group, value.size == 1]
            row[0] += times
            row[1] += times * value.size
            row[2] += times * value.size * width
    return tuple(
        Exchange(*key, count, elements, payload, _wire(key[0], key[2], payload))
        for key, (count, elements, payload) in sorted(rows.items(), key=lambda row: -row[1][2])
    )


def _collectives(program: TracedProgram, times: int) -> Iterator[tuple[Op, TracedProgram, int]]:
    """The collectives of a program, where they are, and how often each runs."""
    for op in program.ops:
        if op.name in COLLECTIVES:
            yield op, program, times
        if op.bodies:
            body = max(op.bodies, key=lambda body: len(list(_collectives(body, 1))))
            yield from _collectives(body, times * op.trips)


def _group_size(op: Op, mesh: Mapping[str, int]) -> int:
    groups: Any = op.params.get("axis_index_groups")
    if groups is not None:
        return len(groups[0])
    names = op.params.get("axes", op.params.get("axis_name"))
    return math.prod(mesh[name] for name in ((names,) if isinstance(names, str) else names))


def _wire(kind: str, group: int, payload: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    return (2 if kind == "all-reduce" else 1) * payload * (group - 1) // group
