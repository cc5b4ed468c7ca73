"""Model FLOPs utilization: the arithmetic of the traced step over the peak of the devices.

PaLM (Chowdhery et al. 2022, appendix B): only what the forward and backward pass need counts, not
what is computed again to save memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gshard._util.chips import Chip, chip_of
from gshard.analysis.cost_model import flops_of
from gshard.analysis.memory.footprint import PLATFORMS, device_program, trace_step
from gshard.train.train_step import TrainStep


def model_flops(step: TrainStep, batch: Any) -> dict[str, float]:
    """Counts the FLOPs of matrix products and convolutions of one step on one device.

    A step that ran with this batch is not traced again, and nothing is compiled. Devices along the
    user's model-parallel axes share the work of a traced step equally.

    Args:
      step: the train step.
      batch: the global batch, concrete or abstract.

    Returns:
      FLOPs by name of the dtype that is multiplied.
    """
    traced = trace_step(step, step.plan.abstract_state(), batch)
    platform = _device(step).platform
    program = device_program(traced, step.plan, platform if platform in PLATFORMS else "gpu")
    shared = math.prod(size for _, size in step.plan.group.model_axes)
    found = flops_of(program, recomputed=False)
    return {dtype: flops / shared for dtype, flops in found.items()}


def seconds_at_peak(flops: Mapping[str, float], peak: Chip | float) -> float:
    """The time of that many FLOPs at the peak of a device, or at that many FLOP/s.

    Dtypes of at most two bytes have the peak of bfloat16.
    """
    if not isinstance(peak, Chip):
        return sum(flops.values()) / peak
    return sum(
        count / (peak.float32 if jnp.dtype(dtype).itemsize > 2 else peak.bfloat16)
        for dtype, count in flops.items()
    )


def chip_of_step(step: TrainStep) -> Chip | None:
    """The data sheet of a step's devices; None for CPUs, and for devices that are not known."""
    device = _device(step)
    return None if device.platform == "cpu" else chip_of(device)


def kind_of(step: TrainStep) -> str:
    """The kind of a step's devices, in JAX's words, such as `NVIDIA L4`."""
    device = _device(step)
    return "a CPU" if device.platform == "cpu" else repr(device.device_kind)


def _device(step: TrainStep) -> Any:
    mesh: Any = step.plan.mesh
    return mesh.devices.flat[0]
