"""`place_shards`: makes an array of the shards that this process's devices hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gshard.checkpoint.bounds import Bounds, bounds_of


def devices_by_bounds(x: jax.ShapeDtypeStruct) -> dict[Bounds, list[Any]]:
    """The shards of an abstract array on this process's devices, and the devices of each."""
    sharding: Any = x.sharding
    devices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(x.shape).items():
        devices.setdefault(bounds_of(index, x.shape), []).append(device)
    return devices


def inside(bounds: Bounds, shape: Sequence[int]) -> tuple[slice, ...]:
    """The part of a shard that an array of this shape has, without padding."""
    return tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, shape, strict=True))


def place_shards(
    x: jax.ShapeDtypeStruct, read: Callable[[Bounds], np.ndarray], at_once: bool = False
) -> jax.Array:
    """An array of the shape and the sharding of `x`, one shard after another, or all `at_once`.

    `read` returns a shard, which nobody may change or free afterwards: on a CPU, JAX may keep it.
    It may be smaller in any dimension, and the rest is padded with zeros.
    """
    sharding, shards = x.sharding, []
    for bounds, devices in devices_by_bounds(x).items():
        part = _padded(read(bounds), bounds)
        for device in devices:
            single = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(part, single, may_alias=False))
        if not at_once:  # otherwise several shards would be on the host at a time
            jax.block_until_ready(shards)
    jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _padded(x: np.ndarray, bounds: Bounds) -> np.ndarray:
    widths = [(0, b - a - n) for (a, b), n in zip(bounds, x.shape, strict=True)]
    return np.pad(x, widths) if any(after for _, after in widths) else x
