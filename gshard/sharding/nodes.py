"""Nodes: devices that share fast links, and what collectives send over the network between nodes.

A node is a host, whose GPUs NVLink joins (or several hosts, if it joins them), or a TPU slice. A
ring over several nodes visits the devices of a node one after another, so it leaves each node once,
and its data is split over the network cards of the node: NCCL has a ring for each card. In an
all-to-all every device sends to every other one.

Source: ZeRO++ (Wang et al., 2023), section 4.3: what an all-to-all over all devices sends between
nodes, next to a reduce-scatter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import check_integer, shown
from gshard.sharding.topology import node_of

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
PERMUTE = "collective-permute"
_ONCE = ("collective-broadcast", PERMUTE, "send")  # send the payload as often as there are links
_TO_EACH = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a mesh.

    Attributes:
      axes: names and sizes of the axes of the mesh.
      of_device: the number of each device's node, in the flat order of the mesh.
    """

    axes: tuple[tuple[str, int], ...]
    of_device: tuple[int, ...]
    _shares: dict[Any, Fraction] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def count(self) -> int:
        """How many nodes there are."""
        return len(set(self.of_device))

    def network_share(self, kind: str, groups: Iterable[Sequence[int]] | None) -> Fraction:
        """Returns what a device sends to other nodes for every byte of a collective's payload.

        It is the mean over the devices of the node that sends most.

        Args:
          kind: HLO's name, such as `all-gather`.
          groups: the devices that communicate together, by their position in the mesh; all of them
            in one group if None. Of a permute the pairs of source and target.
        """
        if self.count == 1:
            return Fraction(0)
        if kind == "send":  # between slices
            return Fraction(1)
        every = [range(len(self.of_device))] if groups is None else groups
        by_size: dict[int, list[Sequence[int]]] = {}
        for group in every:
            by_size.setdefault(len(group), []).append(group)
        devices = np.unique(self.of_device, return_inverse=True)[1]
        found = [_links(kind, devices[np.asarray(rows)], self.count) for rows in by_size.values()]
        factors = [_factor(kind, size) for size in by_size]
        # Fractions are slow, and few nodes differ.
        unlike = set(zip(np.bincount(devices).tolist(), *(x.tolist() for x in found), strict=True))
        return max(
            sum((int(n) * factor for n, factor in zip(links, factors, strict=True)), Fraction(0))
            / size
            for size, *links in unlike
        )

    def network_share_over(
        self, kind: str, axes: tuple[str, ...], parts: tuple[tuple[int, ...], ...] | None = None
    ) -> Fraction:
        """`network_share` of a collective over some axes; `parts` are groups of their indices."""
        key = kind, axes, parts
        if key not in self._shares:
            self._shares[key] = self._share_over(*key)
        return self._shares[key]

    def crosses(self, axis: str) -> bool:
        """Whether devices along an axis are on several nodes."""
        return any(len(set(line)) > 1 for line in self._lines(axis))

    def mixes(self, axis: str) -> bool:
        """Whether they are on several nodes, and several of them on the same one."""
        return any(1 < len(set(line)) < len(line) for line in self._lines(axis))

    def _lines(self, axis: str) -> list[list[int]]:
        """Returns the nodes of the devices along an axis, of each line of them."""
        names, sizes = zip(*self.axes, strict=True)
        return np.array(self.of_device)[groups_along(sizes, [names.index(axis)])].tolist()

    def _share_over(
        self, kind: str, axes: tuple[str, ...], parts: tuple[tuple[int, ...], ...] | None
    ) -> Fraction:
        if parts == ():  # a permute that sends nothing
            return Fraction(0)
        names, sizes = zip(*self.axes, strict=True)
        rows = groups_along(sizes, [names.index(a) for a in axes])
        if parts is not None:
            rows = rows[:, np.array(parts)].reshape(-1, len(parts[0]))
        return self.network_share(kind, rows)


def _links(kind: str, nodes: np.ndarray, count: int) -> np.ndarray:
    """Counts the links on which each node sends to others; every row is the nodes of a group."""
    if kind == PERMUTE:
        source, target = nodes.T
        return np.bincount(source[source != target], minlength=count)
    groups, size = nodes.shape
    found, members = np.unique(np.arange(groups)[:, None] * count + nodes, return_counts=True)
    links = members * (size - members) if kind in _TO_EACH else (members < size).astype(int)
    return np.bincount(found % count, weights=links, minlength=count)


def _factor(kind: str, size: int) -> Fraction:
    """The share of the payload that goes over one link, in a group of `size` devices."""
    return Fraction(1, size) if kind in _TO_EACH else sent_share(kind, size)


def check_kind(kind: object) -> None:
    """Raises a `GShardError` for an unknown kind, of which every count would be 0."""
    if kind not in KINDS:
        raise GShardError(
            f"kind={shown(kind)} is unknown.{did_you_mean(kind, KINDS)} Choose one of "
            f"{', '.join(KINDS)}."
        )


def sent_share(kind: str, size: int) -> Fraction:
    """Returns what a device sends for every byte of a collective's payload.

    By the ring algorithms, in groups of g devices: (g-1)/g in an all-gather, a reduce-scatter and
    an all-to-all, twice that in an all-reduce, and 1 in a permute, a broadcast and a send.
    """
    if kind in _ONCE:
        return Fraction(1)
    return Fraction((2 if kind == "all-reduce" else 1) * (size - 1), size)


def groups_along(sizes: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    """Returns the groups of devices along dimensions of a mesh, a row each, by flat position."""
    ids = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), dims, range(-len(dims), 0))
    return ids.reshape(-1, math.prod(sizes[i] for i in dims))


def nodes_of(mesh: Mesh | AbstractMesh, devices_per_node: int | None = None) -> Nodes:
    """Returns the nodes of a mesh.

    By default JAX says which devices share links. Virtual CPU devices, and a mesh without devices,
    are one node. If it is given, `devices_per_node` adjacent devices of the mesh are one.

    Raises:
      GShardError: `devices_per_node` does not divide the devices.
    """
    axes = tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes, strict=True))
    if devices_per_node is None:
        devices = mesh.devices.flat if isinstance(mesh, Mesh) else [None] * mesh.size
        return Nodes(axes, tuple(map(node_of, devices)))
    n = check_integer("devices_per_node", devices_per_node, 1)
    if n < mesh.size and mesh.size % n:
        raise GShardError(
            f"devices_per_node={n} does not divide the {mesh.size} devices of the mesh. Give the "
            "number of devices that share fast links, such as the 8 GPUs of a host."
        )
    return Nodes(axes, tuple(i // n for i in range(mesh.size)))
