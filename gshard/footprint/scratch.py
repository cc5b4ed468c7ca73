"""Memory that a kernel needs while it runs, beside what it reads and writes."""

from __future__ import annotations

import math

from gshard.footprint.combine import Kernel
from gshard.footprint.program import FREE, Program

# Of an H100 or B200, as XLA fills them: one tile of a matrix product per core.
_CORES, _TILE, _SHORTEST = 132, 64 * 128, 128


def scratch(kernel: Kernel, program: Program, platform: str) -> int:
    """Bytes."""
    if platform == "gpu" and kernel.op.name == "dot_general" and FREE not in kernel.op.ins:
        return (split_k(kernel, program) - 1) * program.values[kernel.writes[0]].bytes
    return 0


def split_k(kernel: Kernel, program: Program) -> int:
    """Into how many partial sums XLA:GPU splits a matrix product that has too few tiles.

    Measured on programs for an H100: the largest power of two by which tiles still fit its cores
    and that leaves a sum of 128 products or more; sums of less than 1024 are not split.
    """
    (left, _), (batch, _) = kernel.op.params["dimension_numbers"]
    shape = program.values[kernel.op.ins[0]].shape
    if batch or len(shape) <= max(left, default=0):
        return 1
    length = math.prod(shape[d] for d in left)
    tiles = max(1, program.values[kernel.writes[0]].size // _TILE)
    if length < 1024:
        return 1
    most = min(_CORES // tiles, length // _SHORTEST)
    return 1 << max(0, most.bit_length() - 1)
