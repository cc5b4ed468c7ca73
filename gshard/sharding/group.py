"""The axes of a mesh by role: which shard the state, which replicate it, which are the user's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import names_of, shown
from gshard.sharding.topology import (
    EXPERT,
    REPLICA,
    SEQUENCE,
    SHARD_AXES,
    crosses_nodes,
)


@dataclass(frozen=True)
class Hop:
    """One collective along one mesh axis, over the full axis or in sub-groups of its indices."""

    axis: str
    size: int  # devices that take part in each collective
    groups: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Group:
    """The axes of a mesh by role: state is sharded over `shard` and replicated over `replica`.

    Attributes:
      shard: names of the shard axes, major to minor.
      replica: names of the replica axes.
      sizes: devices along each shard axis.
      replicas: number of shard groups; each holds a full copy of the state.
      model_axes: names and sizes of the user's model-parallel axes, such as tensor parallelism.
      across_nodes: how many shard axes, the last ones, are across nodes; 0 if none is or all are.
      platform: platform of the devices, `"cpu"`, `"gpu"` or `"tpu"`; empty for an abstract mesh.
      kept: the shard axis on which some parameters are kept; empty for none.
    """

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: tuple[int, ...]
    replicas: int
    model_axes: tuple[tuple[str, int], ...] = ()
    platform: str = ""
    across_nodes: int = 0
    kept: str = ""

    @property
    def size(self) -> int:
        """Devices in one shard group (N)."""
        return math.prod(self.sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """All data axes: gradients are summed over them."""
        return self.replica + self.shard

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The data axes that the examples of a batch are sharded over, in this order.

        The axis that parameters are kept on is the major one: what is gathered over it is then in
        the order of the global batch.
        """
        found = [axis for axis in self.axes if axis != SEQUENCE]
        return tuple(sorted(found, key=lambda axis: axis != self.kept))

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """The axes of `batch_axes` on which nothing is kept."""
        return tuple(axis for axis in self.batch_axes if axis != self.kept)

    @property
    def experts(self) -> int:
        """Devices along the axis that parameters are kept on; 1 without one."""
        return dict(zip(self.shard, self.sizes, strict=True)).get(self.kept, 1)

    def without(self, axis: str) -> Group:
        """Returns the group of an array that is kept on one of the shard axes: the other axes."""
        i = self.shard.index(axis)
        across = self.across_nodes - (i >= len(self.shard) - self.across_nodes)
        return dataclasses.replace(
            self,
            shard=self.shard[:i] + self.shard[i + 1 :],
            sizes=self.sizes[:i] + self.sizes[i + 1 :],
            across_nodes=across,
            kept="",
        )

    @property
    def sequence(self) -> int:
        """Devices along the sequence axis; 1 without one."""
        return dict(zip(self.shard, self.sizes, strict=True)).get(SEQUENCE, 1)

    @property
    def batch_shards(self) -> int:
        """Into how many shards the examples of a batch are split."""
        return self.devices // self.sequence

    @property
    def devices(self) -> int:
        """Devices in all shard groups together."""
        return self.size * self.replicas

    @property
    def hops(self) -> list[Hop]:
        """The steps of an all-gather over the group, minor axis first.

        The first step sends the smallest pieces: over the network, if the last axes are across
        nodes.
        """
        pairs = zip(reversed(self.shard), reversed(self.sizes), strict=True)
        return [Hop(axis, size) for axis, size in pairs]

    def sub_group(self, n: int) -> tuple[list[Hop], list[Hop]]:
        """Returns the hops of an all-gather across sub-groups of `n` adjacent devices, and within.

        Devices of one node are adjacent.

        Raises:
          GShardError: the group cannot be split into sub-groups of `n` devices.
        """
        across, within, rest = [], [], n
        nearest = self.hops[self.across_nodes :] + self.hops[: self.across_nodes]
        for hop in nearest:
            if rest == 1:
                across.append(hop)
            elif rest % hop.size == 0:
                within.append(hop)
                rest //= hop.size
            elif hop.size % rest == 0:
                rows = np.arange(hop.size).reshape(-1, rest)
                own, others = (tuple(map(tuple, x.tolist())) for x in (rows, rows.T))
                within.append(Hop(hop.axis, rest, own))
                across.append(Hop(hop.axis, hop.size // rest, others))
                rest = 1
            else:
                break
        if n < 1 or rest > 1:
            axes = " x ".join(map(str, self.sizes))
            first, *others = (hop.size for hop in nearest)
            more = f", or {first} times a divisor of {others[0]}" if others else ""
            raise GShardError(
                f"a shard group of {axes} devices cannot be split into sub-groups of {n}. Give a "
                f"divisor of {first}{more}."
            )
        return sorted(across, key=lambda hop: -self.shard.index(hop.axis)), within


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a `PartitionSpec` or of Flax's metadata names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def data_group(
    mesh: Mesh | AbstractMesh,
    shard_axes: str | Sequence[str] | None = None,
    replica_axes: str | Sequence[str] | None = None,
) -> Group:
    """Checks a mesh and assigns a role to each of its axes.

    By default the axis named `"replica"` is the replica axis, and those with the names of
    `make_mesh` (`"shard"`, ...) are the shard axes, those across nodes last; without one of these
    all other axes are shard axes. The remaining axes are the user's model-parallel axes. An axis
    named `"sequence"` is always a shard axis.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise GShardError(f"mesh={shown(mesh)} is not a mesh. Make one with gshard.make_mesh().")
    names = tuple(str(name) for name in mesh.axis_names)
    replica = tuple(n for n in names if n == REPLICA)
    if replica_axes is not None:
        replica = names_of("replica_axes", replica_axes)
    rest = tuple(n for n in names if n not in replica)
    named = tuple(n for n in rest if n in SHARD_AXES)
    shard = named if set(named) - {EXPERT, SEQUENCE} else rest
    across: tuple[str, ...] = ()
    if isinstance(mesh, Mesh) and shard_axes is None:
        across = tuple(n for n in shard if crosses_nodes(mesh.devices, names.index(n)))
        across = across if len(across) < len(shard) else ()
        shard = (*(n for n in shard if n not in across), *across)
    if shard_axes is not None:
        shard = names_of("shard_axes", shard_axes)
        shard += (SEQUENCE,) * (SEQUENCE in rest and SEQUENCE not in shard)
    if SEQUENCE in replica:
        raise GShardError(
            f"replica_axes={replica} has {SEQUENCE!r}, but the devices of that axis share the "
            "sequence of an example, and shard the state. Leave it out, or give the axis of "
            "replicas another name."
        )
    for argument, axes in (("shard_axes", shard), ("replica_axes", replica)):
        for axis in axes:
            if axis not in names:
                have = ", ".join(f"{n}={mesh.shape[n]}" for n in names)
                raise GShardError(
                    f"{argument}: axis {axis!r} is not in the mesh (axes: {have})."
                    f"{did_you_mean(axis, names)} Name one of these, or build the mesh with "
                    f"gshard.make_mesh({{{axis!r}: {mesh.size}}})."
                )
    if set(shard) & set(replica) or len(set(shard)) < len(shard) or not shard:
        raise GShardError(
            f"shard_axes={shard} and replica_axes={replica} must name different axes, and at least "
            "one shard axis."
        )
    explicit = [n for n, t in zip(names, mesh.axis_types, strict=True) if t != AxisType.Auto]
    if explicit:
        raise GShardError(
            f"the mesh axes {explicit} are not of type Auto (Explicit is the default of "
            "jax.make_mesh), and Flax layers fail under them. Use gshard.make_mesh(...), or "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}."
        )
    sizes = tuple(mesh.shape[a] for a in shard)
    replicas = math.prod(mesh.shape[a] for a in replica)
    user = tuple((n, mesh.shape[n]) for n in names if n not in shard + replica)
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) and mesh.size else ""
    return Group(shard, replica, sizes, replicas, user, platform, len(across))
