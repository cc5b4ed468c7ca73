"""Where devices are: on which node, and where in the torus of a TPU slice.

A mesh follows the links: devices of one node are adjacent in it, model-parallel axes are within a
node where they fit, and replicas are on different nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

REPLICA, SHARD, SEQUENCE, EXPERT = "replica", "shard", "sequence", "expert"
_SLICE = f"{SHARD}_slice"
_OF_TORUS = [f"{SHARD}_{name}" for name in "xyz"]
SHARD_AXES = (SHARD, _SLICE, *_OF_TORUS, EXPERT, SEQUENCE)  # as `make_mesh` names them


def node_of(device: jax.Device | None) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the number of a device's node: JAX's `slice_index` (GPUs and TPUs), else 0."""
    return getattr(device, "slice_index", None) or 0


def by_node(devices: Sequence[Any]) -> list[Any]:
    """Returns the devices in their order, but those of one node next to each other."""
    return sorted(devices, key=node_of)


def torus_of(devices: Sequence[Any]) -> np.ndarray | None:
    """Arranges TPU devices in an array with one dimension per dimension of their torus.

    On a large torus XLA turns a reduce-scatter over a single mesh axis into an all-reduce, and on a
    3-D torus the all-gather too (seen in programs for v4, v5e, v5p and v6e).

    Returns None if one ring over all devices is as good: on other platforms, for a part of a slice,
    several slices, two devices per chip, a line, and slices of two rows.
    """
    if any(device.platform != "tpu" or device.core_on_chip for device in devices):
        return None
    if len(set(map(node_of, devices))) > 1:
        return None
    coords = np.array([device.coords for device in devices])
    coords -= coords.min(axis=0)
    bounds = coords.max(axis=0) + 1
    sizes = [size for size in bounds if size > 1]
    if math.prod(bounds) != len(devices) or _is_one_ring(sizes):
        return None
    torus = np.empty(bounds, dtype=object)
    torus[tuple(coords.T)] = devices
    return torus.reshape(sizes)


def _is_one_ring(sizes: Sequence[int]) -> bool:
    """Whether a torus, without dimensions of 1, has a ring through all devices that is as good."""
    return len(sizes) < 2 or (len(sizes) == 2 and min(sizes) == 2)


def arrange(
    devices: Sequence[Any], replica: int, extra: Mapping[str, int]
) -> tuple[np.ndarray, list[str]] | None:
    """Arranges all devices of TPU slices by their links; returns them with the names of the axes.

    Replicas are on different slices, then on different planes of the torus; axes of the user's own
    (`extra`) are lines of adjacent devices in a slice. The rest is one shard axis per dimension of
    the torus and one over slices, or a single one.

    Returns None if the order of the devices is as good, or if the sizes do not fit the torus.
    """
    if any(device.platform != "tpu" for device in devices):
        return None
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(node_of(device), []).append(device)
    tori = [torus_of(one) for one in slices.values()]
    shapes = {None if torus is None else torus.shape for torus in tori}
    if len(shapes) > 1 or len(set(map(len, slices.values()))) > 1:
        return None
    if None in shapes and len(slices) == 1:
        return None
    grid = np.array([
        np.array(one) if torus is None else torus
        for torus, one in zip(tori, slices.values(), strict=True)
    ])  # fmt: skip
    major = _taken(replica, grid.shape)
    left = [size // n for size, n in zip(grid.shape, major or grid.shape, strict=True)]
    minor = _taken(math.prod(extra.values()), left[:0:-1])  # never over slices
    if major is None or minor is None:
        return None
    minor = [1, *minor[::-1]]
    kept = [size // n for size, n in zip(left, minor, strict=True)]
    split = grid.reshape([n for sizes in zip(major, kept, minor, strict=True) for n in sizes])
    count = grid.ndim
    split = split.transpose([3 * i + part for part in range(3) for i in range(count)])
    over_slices, *torus = kept
    sizes = {name: size for name, size in zip(_OF_TORUS, torus, strict=False) if size > 1}
    if _is_one_ring(list(sizes.values())):
        sizes = {SHARD: math.prod(torus)}
    if over_slices > 1:
        sizes = {_SLICE: over_slices} | sizes
    sizes = ({REPLICA: replica} if replica > 1 else {}) | sizes | dict(extra)
    return split.reshape(tuple(sizes.values())), list(sizes)


def _taken(count: int, sizes: Sequence[int]) -> list[int] | None:
    """Returns a divisor of each size, large for the first, so that their product is the count.

    None if the sizes do not have such divisors.
    """
    found = []
    for size in sizes:
        found.append(math.gcd(count, size))
        count //= found[-1]
    return found if count == 1 else None


def in_rings(devices: np.ndarray, axis: int) -> np.ndarray:
    """Orders TPU devices along an axis of a mesh in a ring.

    Each is next to the one before or, in a line, two further. Where devices that send to their
    successors are far apart, as the last and the first one of a line, XLA waits for what is sent:
    no permute of ring attention is asynchronous (seen in programs for v5e, also along the 16
    devices of a dimension that wraps around).

    Other devices, and those of several slices, keep their order.
    """
    line = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)[:, 0]
    if any(x.platform != "tpu" for x in line) or len(set(map(node_of, line))) > 1:
        return devices
    coords = np.array([(*x.coords, x.core_on_chip) for x in line])
    at = np.stack([np.unique(column, return_inverse=True)[1] for column in coords.T], -1)
    at = at[:, at.max(0) > 0]
    sizes = (at.max(0) + 1).tolist()
    if not sizes or math.prod(sizes) != len(line):
        return devices
    ring = ring_of(sizes)
    position = {tuple(x): i for i, x in enumerate(at.tolist())}
    return devices.take([position[x] for x in ring], axis)


def ring_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders the points of a grid so that each is next to the one before, the first to the last.

    `sizes` are those of its dimensions, above 1.

    There is no such ring in a line, or through an odd number of points. Then every second point
    comes on the way there, and the others on the way back.

    Example:
      >>> ring_of([2, 3])
      [(0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (0, 0)]
      >>> ring_of([5])
      [(0,), (2,), (4,), (3,), (1,)]
    """
    size, *others = sizes
    rest = _path(others)
    if len(rest) > 1 and size % 2 == 0:
        there = [(i, x) for i in range(size) for x in _turned(rest[1:], i)]
        return [(i, *x) for i, x in [*there, *((i, rest[0]) for i in reversed(range(size)))]]
    if size > 1 and len(rest) % 2 == 0:
        there = [(i, x) for at, x in enumerate(rest) for i in _turned(range(1, size), at)]
        return [(i, *x) for i, x in [*there, *((0, x) for x in reversed(rest))]]
    path = _path(sizes)
    return path[::2] + path[1::2][::-1]


def _path(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders the points of a grid so that each is next to the one before."""
    if not sizes:
        return [()]
    size, *others = sizes
    rest = _path(others)
    return [(i, *x) for i in range(size) for x in _turned(rest, i)]


def _turned(points: Sequence[Any], row: int) -> Sequence[Any]:
    """Every second row is walked backwards."""
    return points[::-1] if row % 2 else points


def crosses_nodes(devices: np.ndarray, axis: int) -> bool:
    """Whether devices along an axis of a mesh are on several nodes."""
    nodes = np.vectorize(node_of, otypes=[int])(devices)
    return bool((np.diff(nodes, axis=axis) != 0).any())
