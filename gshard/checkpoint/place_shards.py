"""`place_shards`: makes an array of the shards that this process's devices hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gshard.checkpoint.bounds import Bounds, bounds_of
from gshard.sharding.layout import HOST

_AT_ONCE = 2**24  # bytes of an array whose shards may all be on the host


def devices_by_bounds(x: jax.ShapeDtypeStruct) -> dict[Bounds, list[Any]]:
    """The shards of an abstract array on this process's devices, and the devices of each."""
    return _devices_by_bounds(x.sharding, x.shape)


@lru_cache(maxsize=1024)  # many arrays have the same shape
def _devices_by_bounds(sharding: Any, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    devices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(bounds_of(index, shape), []).append(device)
    return devices


def inside(bounds: Bounds, shape: Sequence[int]) -> tuple[slice, ...]:
    """The part of a shard that an array of this shape has, without padding."""
    return tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, shape, strict=True))


def place_shards(
    x: jax.ShapeDtypeStruct,
    read: Callable[[Sequence[Bounds]], Sequence[np.ndarray]],
    at_once: bool = False,
) -> jax.Array:
    """An array of the shape and the sharding of `x`.

    `read` returns shards, which nobody may change or free afterwards: on a CPU, JAX may keep them.
    They may be smaller in any dimension, and the rest is padded with zeros. Of a large array one
    shard after another is on the host, unless all may be there `at_once`.
    """
    sharding, devices = x.sharding, devices_by_bounds(x)
    if at_once or x.dtype.itemsize * prod(x.shape) <= _AT_ONCE:
        # One call for all devices: with many small arrays, the calls are what takes the time.
        parts = dict(zip(devices, map(_padded, read([*devices]), devices), strict=True))
        array = jax.make_array_from_callback(
            x.shape, sharding, lambda index: parts[bounds_of(index, x.shape)], dtype=x.dtype
        )
        return jax.block_until_ready(array)
    shards = []
    for bounds, holders in devices.items():
        part = _padded(read([bounds])[0], bounds)
        for device in holders:
            single = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(part, single, may_alias=False))
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def host_copy(x: jax.Array) -> jax.Array:
    """A copy of an array in the host's memory; any other array itself.

    A thread that writes such an array reads it where it is. Meanwhile, on a GPU, a program that is
    to reuse its memory fails: JAX donates no buffer to which NumPy refers.
    """
    if x.sharding.memory_kind != HOST:
        return x
    shards = {bounds_of(part.index, x.shape): part.data for part in x.addressable_shards}
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return place_shards(like, lambda several: [np.array(shards[bounds]) for bounds in several])


def _padded(x: np.ndarray, bounds: Bounds) -> np.ndarray:
    if x.shape == (shape := tuple(b - a for a, b in bounds)):
        return x
    return np.pad(x, [(0, n - k) for n, k in zip(shape, x.shape, strict=True)])
