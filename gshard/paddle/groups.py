"""Paddle's groups as meshes: which devices share a division, and which hold copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gshard.arguments import shown
from gshard.errors import GShardError
from gshard.mesh import REPLICA, SHARD, data_group, make_mesh


def mesh_of(group: Any = None, dp_group: Any = None) -> tuple[Mesh, Any, Any]:
    """The mesh that `group=` and `dp_group=` mean, and its shard and replica axes.

    Args:
      group: devices of `gshard.new_group` over which state is divided, a mesh of
        `gshard.make_mesh`, or None for all devices.
      dp_group: devices, one in each copy of the divided state, which share one device with `group`;
        or names of the axes of the mesh that is given as `group`.

    Returns:
      The mesh, and the axes as `shard_train_state` takes them: None where its default holds.

    Raises:
      GShardError: for groups that overlap otherwise, or that name devices twice.
    """
    if isinstance(group, Mesh):
        if dp_group is not None and not _names(dp_group):
            raise GShardError(
                f"dp_group={shown(dp_group)} beside a mesh must name its axes, such as "
                f"dp_group='replica'; the mesh has {group.axis_names}."
            )
        data_group(group, None, dp_group)
        return group, None, dp_group
    shard = None if group is None else _devices("group", group)
    if dp_group is None:
        return (make_mesh() if shard is None else make_mesh(devices=shard)), None, None
    copies = _devices("dp_group", dp_group)
    if shard is None:
        raise GShardError(
            "dp_group= says where the copies are, and group= is missing: name the devices of one "
            "copy, such as group=gshard.new_group([0, 1]), dp_group=gshard.new_group([0, 2])."
        )
    common = [d for d in shard if d in copies]
    if len(common) != 1:
        raise GShardError(
            f"group={_ids(shard)} and dp_group={_ids(copies)} share {len(common)} devices; two "
            "orthogonal groups share one, as [0, 1] and [0, 2] do."
        )
    return _grid(shard, copies, common[0]), (SHARD,), (REPLICA,)


def _grid(shard: list[Any], copies: list[Any], common: Any) -> Mesh:
    """Replicas x shards: each copy lies as far from `shard` as its device from the common one."""
    every = jax.devices()
    place = {device: i for i, device in enumerate(every)}
    rows = [[place[d] + place[copy] - place[common] for d in shard] for copy in copies]
    flat = [i for row in rows for i in row]
    if len(set(flat)) < len(flat) or not all(0 <= i < len(every) for i in flat):
        raise GShardError(
            f"group={_ids(shard)} and dp_group={_ids(copies)} do not span a grid: the copies would "
            f"be {rows} of {len(every)} devices. Their devices must lie at equal distances, as [0, "
            "1] and [0, 2] do; or pass group=gshard.make_mesh(replica=2), dp_group='replica'."
        )
    grid = np.array([[every[i] for i in row] for row in rows])
    return Mesh(grid, (REPLICA, SHARD), axis_types=(AxisType.Auto,) * 2)


def _devices(argument: str, given: Any) -> list[Any]:
    fits = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not fits or not all(isinstance(d, jax.Device) for d in given):
        raise GShardError(
            f"{argument}={shown(given)} is no group. Pass gshard.new_group([0, 1]), devices, or as "
            "group= a mesh of gshard.make_mesh."
        )
    if len(set(given)) < len(given):
        raise GShardError(f"{argument}={_ids(given)} names a device twice.")
    return list(given)


def _names(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)


def _ids(devices: Sequence[Any]) -> list[int]:
    return [d.id for d in devices]
