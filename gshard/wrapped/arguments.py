"""Converts what users pass: a model of NNX or Linen, and the devices to shard it over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.errors import InvalidRngError, ModifyScopeVariableError
from flax.nnx.bridge import variables as bridged
from jax.sharding import Mesh

from gshard._util.errors import GShardError, some
from gshard._util.validation import names_of, shown
from gshard.sharding.group import data_group
from gshard.sharding.mesh import devices_of, make_mesh
from gshard.sharding.topology import SHARD
from gshard.wrapped.wrapped_model import Wrapped, free_dropped


class _Linen(nnx.bridge.ToNNX):
    """A Linen module as a module of NNX, with errors that say what to do."""

    def __call__(self, *args: Any, **by_name: Any) -> Any:
        try:
            return super().__call__(*args, **by_name)
        except InvalidRngError as error:
            raise GShardError(
                "the Linen module draws random numbers, as dropout does, and its variables contain "
                "no key. To turn dropout off, pass the module's own flag, such as "
                "deterministic=True or train=False. To keep it, wrap "
                "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(inputs) instead of (module, "
                "variables). This initializes new parameters: copy yours into it if they are "
                f"trained. Flax says: {str(error).partition(' (https:')[0]}"
            ) from error
        except ModifyScopeVariableError as error:
            found = re.search(r'collection "(\w+)"', str(error))
            name = found[1] if found else "batch_stats"
            raise GShardError(
                f"the Linen module changes its collection {name!r} during the call, as BatchNorm "
                f"does. Say that it may: model(x, mutable=[{name!r}])."
            ) from error


def as_module(model: Any, call: str, kind: type[Wrapped]) -> nnx.Module:
    """Returns the given NNX module, or one that applies a Linen module to its variables.

    `kind` is the class that it is wrapped in, `call` what the user calls.
    """
    if isinstance(model, Wrapped):
        raise GShardError(
            f"{call}: this model is wrapped already, or is a copy of a wrapped one. Wrap the "
            "original, unwrapped model, and copy the values: "
            "new.load_state_dict(this.state_dict())."
        )
    free_dropped()  # before another model takes memory
    if isinstance(model, nnx.Module):
        ours = {name for name in dir(kind) if not name.startswith("_")} | {"plan"}
        ours -= set(dir(nnx.Module))  # which ours call
        hidden = [x for x in sorted(ours) if x in vars(model) or hasattr(type(model), x)]
        if hidden:
            raise GShardError(
                f"{type(model).__name__} has {some(hidden)} of its own, which a wrapped model uses "
                "in another sense. Rename it."
            )
        return model
    if isinstance(model, nn.Module):
        raise GShardError(
            f"{call}: a Linen module needs its variables: pass (module, module.init(key, inputs))."
        )
    if isinstance(model, (tuple, list)) and len(model) == 2:
        module, variables = model
        if isinstance(module, nn.Module) and isinstance(variables, Mapping):
            if "params" not in variables:
                raise GShardError(
                    f"{call}: the variables of a Linen module have no 'params', only "
                    f"{some(map(shown, variables))}. Pass all that module.init returned, or "
                    '{"params": params}.'
                )
            made = _Linen(module)
            for name, value in bridged.linen_vars_to_nnx_attrs(variables).items():
                setattr(made, name, nnx.data(value))
            return made
    raise GShardError(
        f"{call}: {shown(model)} is not a model. Pass an nnx.Module, or (linen_module, variables)."
    )


def mesh_of(
    group: Any = None, dp_group: Any = None, argument: str = "group"
) -> tuple[Mesh, tuple[str, ...] | None]:
    """Returns the mesh that `group=` and `dp_group=` describe, and its replica axes.

    Args:
      group: devices of `gshard.distributed.new_group` to shard the state over, a mesh of
        `gshard.make_mesh`, or None for all devices.
      dp_group: devices, one in each replica of the sharded state, of which one is in `group`; or
        axis names of the mesh that is given as `group`. The axes are None without these.
      argument: what `group` is called in messages.
    """
    if isinstance(group, Mesh):
        axes = None if dp_group is None else names_of("dp_group", dp_group)
        data_group(group, None, axes)
        return group, axes
    shard = None if group is None else devices_of(argument, group, ", or a mesh of make_mesh")
    if dp_group is None:
        return (make_mesh() if shard is None else make_mesh(devices=shard)), None
    copies = devices_of("dp_group", dp_group, ", or with a mesh the names of its axes")
    if shard is None:
        raise GShardError(
            "dp_group= names the devices of the replicas, but group= is missing: name the devices "
            "of one replica, such as group=new_group([0, 1]), dp_group=new_group([0, 2])."
        )
    common = [d for d in shard if d in copies]
    groups = f"group={[d.id for d in shard]} and dp_group={[d.id for d in copies]}"
    if len(common) != 1:
        raise GShardError(
            f"{groups} share {len(common)} devices; two orthogonal groups share one, as [0, 1] and "
            "[0, 2] do."
        )
    # Each replica is `shard`, shifted to its own device.
    every = jax.devices()
    index = {device: i for i, device in enumerate(every)}
    grid = [[index[d] + index[copy] - index[common[0]] for d in shard] for copy in copies]
    flat = [i for replica in grid for i in replica]
    if len(set(flat)) < len(flat) or not all(0 <= i < len(every) for i in flat):
        raise GShardError(
            f"{groups} do not span a grid: the replicas would be {grid} of {len(every)} devices. "
            "Their devices must be at equal distances, as in [0, 1] and [0, 2]; or pass "
            "group=gshard.make_mesh(replica=2), dp_group='replica'."
        )
    shape = {SHARD: len(shard)}  # given, so that a TPU torus does not change the replicas
    return make_mesh(shape, replica=len(copies), devices=[every[i] for i in flat]), None


def first_process(mesh: Mesh) -> int:
    """Returns the lowest rank in a mesh: all processes take its model, as Paddle and PyTorch do."""
    return min(device.process_index for device in mesh.devices.flat)
