"""How long kernels and collectives take on an H100, as XLA:GPU believes when it orders them.

After its `SolLatencyEstimator`: tables that were measured for collectives and matrix products, and
the bandwidth of the device's memory for everything else. Those tables are held here by a start and
a rate, and collectives among more than one host's devices are taken for those of 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from gshard.analysis.memory.combine import Kernel
from gshard.analysis.memory.program import COLLECTIVES, Program
from gshard.analysis.memory.traffic import flops_of_op

# Microseconds, and bytes (operations) a microsecond.
_START = {"all-gather": 19.0, "reduce-scatter": 33.0, "all-reduce": 40.0}
_OTHER = 19.0
_WIRE, _MEMORY = 0.38e6, 3.35e6
_PRODUCT, _FLOPS = 6.0, 400e6
_CONVOLUTION = 10.0


def latency(kernel: Kernel, program: Program) -> float:
    """Microseconds from the start of a collective to its end."""
    kind = COLLECTIVES[kernel.op.name]
    size = max(_bytes(kernel.reads, program), _bytes(kernel.writes, program))
    return _START.get(kind, _OTHER) + size * (2 if kind == "all-reduce" else 1) / _WIRE


def time_of(kernel: Kernel, program: Program) -> float:
    """Microseconds of a kernel that is no collective; a loop counts as nothing there."""
    if kernel.op.bodies:
        return 0.0
    if kernel.op.name == "conv_general_dilated":
        return _CONVOLUTION
    if flops := flops_of_op(kernel.op, program):
        return _PRODUCT + flops / _FLOPS
    return _bytes((*kernel.reads, *kernel.writes), program) / _MEMORY


def _bytes(numbers: Sequence[int], program: Program) -> int:
    return sum(program.values[i].bytes for i in numbers)
