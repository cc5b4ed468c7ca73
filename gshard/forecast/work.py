"""What a program computes, reads and writes, and sends: counted off its operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gshard.forecast.fusion import fused
from gshard.forecast.program import FREE, Op, Program, Value

_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
}
_SLICES = {"dynamic_slice", "slice", "gather"}
# What writes a part of its result in place; of its last so many operands the smallest is the part.
_UPDATES = {"stack_slice": 1, "dynamic_update_slice": 2, "scatter": 2, "scatter-add": 2}


@dataclass
class Work:
    """The work of one device, loops multiplied. A loop of unknown length counts once.

    Attributes:
      flops: of matrix products and convolutions, two for a multiplication with its addition, by
        the name of the operands' dtype.
      traffic: bytes that kernels read and write.
      sent: bytes by kind of collective, by the ring algorithms. Scalars are left out.
    """

    flops: dict[str, float] = field(default_factory=dict)
    traffic: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, other: Work, times: int) -> None:
        """Adds what a body does in all its rounds."""
        for dtype, count in other.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0.0) + times * count
        for kind, count in other.sent.items():
            self.sent[kind] = self.sent.get(kind, 0) + times * count
        self.traffic += times * other.traffic


def work_of(program: Program, sizes: Mapping[str, int], platform: str) -> Work:
    """The work of a program of one device.

    Args:
      program: of a traced step.
      sizes: of the mesh axes by name.
      platform: whose fusion decides what goes through memory.
    """
    found = Work()
    for op in program.ops:
        values = [None if i == FREE else program.values[i] for i in op.ins]
        out = program.values[op.outs[0]]
        if op.name in ("dot_general", "conv_general_dilated") and values[0] and values[1]:
            count = 2.0 * out.size * _contracted(op, values[0], values[1])
            dtype = str(values[0].dtype)
            found.flops[dtype] = found.flops.get(dtype, 0.0) + count
        elif op.name in _KINDS:
            kind = _KINDS[op.name]
            for value, i in zip(values, op.outs, strict=True):
                if value is not None and value.size > 1:
                    sent = _sent(kind, value, program.values[i], _members(op, sizes))
                    found.sent[kind] = found.sent.get(kind, 0) + sent
        for body in op.bodies:
            found.add(work_of(body, sizes, platform), op.trips)
    found.traffic += _traffic(program, platform)
    return found


def _traffic(program: Program, platform: str) -> int:
    """Bytes that the kernels of a program read and write, those of its loops aside."""
    sizes = [value.bytes for value in program.values]
    users: dict[int, list[Op]] = {}
    for op in program.ops:
        for i in op.ins:
            users.setdefault(i, []).append(op)

    def read(i: int) -> int:
        """A value of which only slices are read is read in slices."""
        slices = [op for op in users.get(i, ()) if op.name in _SLICES]
        if slices and len(slices) == len(users[i]):
            return min(sizes[i], sum(sizes[op.outs[0]] for op in slices))
        return sizes[i]

    def written(op: Op, i: int) -> int:
        if op.name not in _UPDATES:
            return sizes[i]
        return min([sizes[i], *(sizes[j] for j in op.ins[-_UPDATES[op.name] :] if j != FREE)])

    kernels = [kernel for kernel in fused(program, platform).kernels if not kernel.op.bodies]
    return sum(
        sum(map(read, set(kernel.reads) - set(kernel.writes)))
        + sum(written(kernel.op, i) for i in kernel.writes)
        for kernel in kernels
    )


def _contracted(op: Op, left: Value, right: Value) -> int:
    """Multiplications for one element of the result."""
    if op.name == "dot_general":
        (dims, _), _ = op.params["dimension_numbers"]
        return math.prod(left.shape[d] for d in dims)
    of_filters = op.params["dimension_numbers"].rhs_spec[0]  # features of the result
    return right.size // right.shape[of_filters]


def _members(op: Op, sizes: Mapping[str, int]) -> int:
    """Devices that an operation is over."""
    groups = op.params.get("axis_index_groups")
    if groups:
        return len(groups[0])
    if "axis_size" in op.params:
        return op.params["axis_size"]
    axes = op.params.get("axes", op.params.get("axis_name", ()))
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(sizes[name] for name in names)


def _sent(kind: str, value: Value, out: Value, n: int) -> int:
    if kind == "all-gather":
        return out.bytes * (n - 1) // n
    return value.bytes * (n - 1) // n * (2 if kind == "all-reduce" else 1)
