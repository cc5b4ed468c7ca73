"""What really lies on the devices: a state's arrays, measured, and what is alive beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten
from gshard.sharding.layout import HOST, Layout

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan

Shape = tuple[tuple[int, ...], str]  # of an array, with its dtype


@dataclass(frozen=True)
class Beside:
    """Live arrays that are not the state's, of one shape, dtype and place.

    Attributes:
      shape: global shape.
      dtype: its name.
      lies: `on cpu:0`, `whole on 8 devices`, `divided over 8 devices`; `, on host` after it.
      count: arrays.
      bytes: on the device that holds most of them.
    """

    shape: tuple[int, ...]
    dtype: str
    lies: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Copy:
    """Live arrays that look like a part of the state, though they are not the state's.

    Attributes:
      of: `parameters`, `optimizer state` or `extras`.
      lies: as in `Beside`, or `on 8 devices`.
      count: arrays.
      shapes: the largest of them, in words.
      bytes: on one device, all of them.
    """

    of: str
    lies: str
    count: int
    shapes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Measured:
    """Bytes that are alive in this process.

    Attributes:
      state: by device the bytes of the state, by part as `plan.bytes_per_device` has them.
      differs: leaves whose bytes or place are not the plan's, in words; none: all is as planned.
      beside: live arrays that are not the state's, most bytes first.
      beside_bytes: the sum of them by device.
      copies: parts of a state among them.
      backend: by device what the backend says of its memory, where it says anything.
    """

    state: dict[str, dict[str, int]]
    differs: tuple[str, ...]
    beside: tuple[Beside, ...]
    beside_bytes: dict[str, int]
    copies: tuple[Copy, ...]
    backend: dict[str, dict[str, int]]


def measure(state: Any, plan: Plan) -> Measured:
    """Measures a state that has arrays, and what else is alive on its devices' platform.

    Args:
      state: the parts of it (`Parts`).
      plan: over a concrete mesh.
    """
    if not isinstance(plan.mesh, Mesh):
        raise GShardError(
            "explain(state, plan): the state has arrays, and the plan was made without devices. "
            "Leave plan out: the state knows its own."
        )
    devices = list(plan.mesh.local_devices)
    alive = jax.live_arrays(
        plan.mesh.devices.flat[0].platform
    )  # before any shard of one is looked at
    found = {str(d): dict.fromkeys(plan.bytes_per_device, 0) for d in devices}
    paths, leaves, _ = flatten(state)
    own: set[Any] = set()
    differs: list[str] = []
    for path, x, layout in zip(paths, leaves, jax.tree.leaves(plan.layouts), strict=True):
        part, held = path.split("/")[0], Counter[str]()
        for device, key, size, on_host in _buffers(x):
            own.add(key)
            held[device] += size
            if part in found.get(device, {}):  # the count of steps is in no part
                found[device]["host" if on_host else part] += size
            if on_host != layout.on_host:
                differs.append(f"{path}: on the {'host' if on_host else 'device'} of {device}")
        differs += _differences(path, x, held, layout, list(found))
    strange = [(x, mine) for x in alive if (mine := [b for b in _buffers(x) if b[1] not in own])]
    # An array over several devices before views of its parts, which are the same memory.
    strange.sort(key=lambda pair: -len(pair[1]))
    others: list[tuple[jax.Array, list[Any]]] = []
    for x, buffers in strange:
        mine = [b for b in buffers if b[1] not in own]
        own.update(b[1] for b in mine)
        if mine:
            others.append((x, mine))
    by_device = Counter[str]()
    for _, buffers in others:
        for device, _, size, _ in buffers:
            by_device[device] += size
    stats = {str(d): d.memory_stats() for d in devices}
    return Measured(
        found,
        tuple(differs),
        _grouped(others),
        dict(by_device),
        tuple(_copies(others, plan)),
        {device: dict(x) for device, x in stats.items() if x},
    )


def _buffers(x: Any) -> list[tuple[str, Any, int, bool]]:
    """(device, what identifies the memory, bytes, whether the host's) of every part that is here.

    Views of one part are arrays of their own that share its memory.
    """
    if not isinstance(x, jax.Array) or x.is_deleted():
        return []
    found = []
    for shard in x.addressable_shards:
        size = shard.data.nbytes
        if size:
            on_host = shard.data.sharding.memory_kind == HOST
            found.append((str(shard.device), _identity(shard), size, on_host))
    return found


def _identity(shard: Any) -> Any:
    try:
        return shard.device, shard.data.unsafe_buffer_pointer()
    except (NotImplementedError, RuntimeError):  # a backend that tells no addresses
        return shard.device, id(shard.data)


def _differences(
    path: str, x: Any, held: Counter[str], layout: Layout, devices: Sequence[str]
) -> Iterator[str]:
    if not isinstance(x, jax.Array):
        yield f"{path}: not on a device, a {type(x).__name__}"
        return
    for device in dict.fromkeys([*devices, *held]):
        wanted = layout.bytes_per_device if device in devices else 0
        if held[device] != wanted:
            yield (
                f"{path}: {held[device]:,} B on {device}, by the plan {wanted:,} B (it has shape "
                f"{x.shape}, planned {layout.stored_shape})"
            )
            return


def _grouped(others: Iterable[tuple[jax.Array, list[Any]]]) -> tuple[Beside, ...]:
    groups: dict[tuple[tuple[int, ...], str, str], list[list[Any]]] = {}
    for x, buffers in others:
        groups.setdefault((x.shape, str(x.dtype), _lies(x, buffers)), []).append(buffers)
    found = [
        Beside(shape, dtype, lies, len(arrays), _fullest(arrays))
        for (shape, dtype, lies), arrays in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _lies(x: jax.Array, buffers: list[Any]) -> str:
    devices = {device for device, *_ in buffers}
    host = ", on host" if buffers[0][3] else ""
    if len(devices) == 1:
        return f"on {buffers[0][0]}{host}"
    how = "whole on" if x.is_fully_replicated else "divided over"
    return f"{how} {len(devices)} devices{host}"


def _fullest(arrays: Iterable[list[Any]]) -> int:
    """Bytes on the device that holds most."""
    by_device = Counter[str]()
    for buffers in arrays:
        for device, _, size, _ in buffers:
            by_device[device] += size
    return max(by_device.values(), default=0)


def _copies(others: Sequence[tuple[jax.Array, list[Any]]], plan: Plan) -> Iterator[Copy]:
    """Parts of a state among the arrays of each place, as often as they are there completely."""
    places: dict[str, dict[Shape, list[tuple[jax.Array, list[Any]]]]] = {}
    for x, buffers in others:
        devices = {device for device, *_ in buffers}
        place = _lies(x, buffers) if len(devices) == 1 else f"on {len(devices)} devices"
        key = (x.shape, str(x.dtype))
        places.setdefault(place, {}).setdefault(key, []).append((x, buffers))
    wanted = _wanted(plan)
    for place, by_shape in places.items():
        left = list(wanted)
        while left:  # a whole state before a second copy of one of its parts
            name, shapes = left.pop(0)
            if any(len(by_shape.get(shape, ())) < n for shape, n in shapes.items()):
                continue
            left.append((name, shapes))
            taken = [by_shape[shape].pop() for shape, n in shapes.items() for _ in range(n)]
            largest = sorted(shapes, key=lambda s: -math.prod(s[0]))
            yield Copy(
                name,
                place,
                len(taken),
                tuple(f"{shapes[s]} x {s[1]}{list(s[0])}" for s in largest[:3]),
                _fullest(buffers for _, buffers in taken),
            )


def _wanted(plan: Plan) -> list[tuple[str, Counter[Shape]]]:
    """Shapes of each part of a state, as the user made it and as stored; without single numbers."""
    plain, stored = plan.kind.split(plan.template), plan.layouts
    found: list[tuple[str, Counter[Shape]]] = []
    for attribute, name in (
        ("params", "parameters"),
        ("opt_state", "optimizer state"),
        ("extras", "extras"),
    ):
        logical = [
            (tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(getattr(plain, attribute))
        ]
        places = jax.tree.leaves(getattr(stored, attribute))
        divided = [(x.stored_shape, str(x.dtype)) for x in places]
        for shapes in (logical, divided):
            counted = Counter(shape for shape in shapes if math.prod(shape[0]) > 1)
            if counted and (name, counted) not in found:
                found.append((name, counted))
    return found
