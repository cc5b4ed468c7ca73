"""The torus that the chips of a TPU slice are wired as."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def torus_of(devices: Sequence[Any]) -> np.ndarray | None:
    """The devices as an array with one dimension for each of their torus, or None.

    None where one ring over all of them is as good: other machines, parts of a slice, several
    slices, two devices to a chip, a line, and slices of two rows. On larger ones XLA makes a
    reduce-scatter over a single axis into an all-reduce, and on 3-D tori the all-gather too (seen
    in programs for v4, v5e, v5p and v6e).

    Args:
      devices: those of one shard group.
    """
    if any(device.platform != "tpu" for device in devices):
        return None
    if any(device.core_on_chip for device in devices):
        return None
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return None
    places = np.array([device.coords for device in devices])
    places -= places.min(axis=0)
    bounds = places.max(axis=0) + 1
    if math.prod(bounds) != len(devices):
        return None
    sizes = [size for size in bounds if size > 1]
    if len(sizes) < 2 or (len(sizes) == 2 and min(sizes) == 2):
        return None
    torus = np.empty(bounds, dtype=object)
    for device, place in zip(devices, places, strict=True):
        torus[tuple(place)] = device
    return torus.reshape(sizes)
