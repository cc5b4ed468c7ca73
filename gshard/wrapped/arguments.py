"""Converts what users pass: a model of NNX or Linen, and the devices to shard it over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.nnx.bridge import variables as bridged
from jax.sharding import Mesh

from gshard._util.errors import GShardError
from gshard._util.validation import names_of, shown
from gshard.sharding.mesh import data_group, devices_of, make_mesh
from gshard.wrapped.wrapped_model import Wrapped, refuse_hidden


def as_module(model: Any, call: str) -> nnx.Module:
    """Returns the given NNX module, or one that applies a Linen module to its variables.

    Raises:
      GShardError: `model` is neither; the message names the call.
    """
    if isinstance(model, nnx.Module):
        refuse_hidden(model)
        return model
    if isinstance(model, nn.Module):
        raise GShardError(
            f"{call}: a Linen module needs its variables: pass (module, module.init(key, inputs))."
        )
    if isinstance(model, (tuple, list)) and len(model) == 2:
        module, variables = model
        if isinstance(module, nn.Module) and isinstance(variables, Mapping):
            made = nnx.bridge.ToNNX(module)
            for name, value in bridged.linen_vars_to_nnx_attrs(variables).items():
                setattr(made, name, nnx.data(value))
            return made
    raise GShardError(
        f"{call}: {shown(model)} is no model. Pass an nnx.Module, or (linen_module, variables)."
    )


def refuse_wrapped(model: Any, call: str) -> None:
    """Raises a `GShardError` if a model is already wrapped."""
    if isinstance(model, Wrapped):
        raise GShardError(
            f"{call}: this model is wrapped already. Wrap the model that it was made of."
        )


def mesh_of(
    group: Any = None, dp_group: Any = None, argument: str = "group"
) -> tuple[Mesh, tuple[str, ...] | None]:
    """Returns the mesh that `group=` and `dp_group=` describe, and its replica axes.

    Args:
      group: devices of `gshard.distributed.new_group` to shard the state over, a mesh of
        `gshard.make_mesh`, or None for all devices.
      dp_group: devices, one in each replica of the sharded state, of which one is in `group`; or
        axis names of the mesh that is given as `group`.
      argument: what `group` is called in messages.

    Returns:
      The mesh, and the axes as `shard_train_state` takes them: None for its default.

    Raises:
      GShardError: the groups do not overlap in exactly one device, or name a device twice.
    """
    if isinstance(group, Mesh):
        axes = None if dp_group is None else names_of("dp_group", dp_group)
        data_group(group, None, axes)
        return group, axes
    shard = None if group is None else devices_of(argument, group, ", or a mesh of make_mesh")
    if dp_group is None:
        return (make_mesh() if shard is None else make_mesh(devices=shard)), None
    copies = devices_of("dp_group", dp_group, ", or beside a mesh the names of its axes")
    if shard is None:
        raise GShardError(
            "dp_group= says where the copies are, and group= is missing: name the devices of one "
            "copy, such as group=new_group([0, 1]), "
            "dp_group=new_group([0, 2])."
        )
    common = [d for d in shard if d in copies]
    if len(common) != 1:
        raise GShardError(
            f"group={_ids(shard)} and dp_group={_ids(copies)} share {len(common)} devices; two "
            "orthogonal groups share one, as [0, 1] and [0, 2] do."
        )
    return _grid(shard, copies, common[0]), None


def _grid(shard: list[Any], copies: list[Any], common: Any) -> Mesh:
    """Returns a mesh of replicas x shards; each replica is `shard`, shifted to its own device."""
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
    return make_mesh(replica=len(copies), devices=[every[i] for i in flat])


def _ids(devices: Sequence[Any]) -> list[int]:
    return [d.id for d in devices]
