"""Makes device meshes.

gshard makes the mesh itself because `jax.make_mesh` defaults to Explicit axes, under which plain
Flax layers fail.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard._util.activity import doing
from gshard._util.arguments import named_arguments
from gshard._util.cpu_threads import thread_variables
from gshard._util.errors import GShardError, warn
from gshard._util.validation import check_integer, dimension, shown
from gshard.sharding.topology import (
    EXPERT,
    REPLICA,
    SEQUENCE,
    SHARD,
    SHARD_AXES,
    arrange,
    by_node,
    in_rings,
)

_INSTEAD = {  # of other libraries' axes
    **dict.fromkeys(
        ("data", "dp", "fsdp", "shard"),
        "Leave it out: the state is sharded over all devices that the other axes leave.",
    ),
    **{
        axis: f"It is an axis of your own: extra={{{axis!r}: 2}}."
        for axis in ("model", "tensor", "tp", "mp")
    },
    **dict.fromkeys(("context", "seq", "cp", "sp"), "It is sequence= here."),
    **dict.fromkeys(("experts", "ep"), "It is expert= here."),
    **dict.fromkeys(("replicas", "ddp"), "It is replica= here."),
    "axes": "It is shape= here, such as {'shard': 8}.",
    **dict.fromkeys(
        ("axis_shapes", "axis_names", "axis_types", "*"),
        "Give the axes their sizes by name, such as gshard.make_mesh({'a': 2, 'b': 4}).",
    ),
}


@named_arguments(_INSTEAD)
def make_mesh(
    shape: Mapping[str, int] | None = None,
    *,
    replica: int = 1,
    expert: int = 1,
    sequence: int = 1,
    extra: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Makes the device mesh over which a train state is sharded.

    Args:
      shape: sizes of the shard axes by name, major to minor, such as `{"a": 2, "b": 4}`. By default
        there is one axis, `"shard"`, over all devices that `replica`, `expert`, `sequence` and
        `extra` leave. On a TPU torus there is one axis per dimension: `"shard_x"`, `"shard_y"`,
        ..., and `"shard_slice"` over several slices.
      replica: number of replicas of the sharded state (hybrid sharding). A `"replica"` axis of this
        size comes first: state is sharded within a replica, and gradients are summed over replicas.
        Replicas are on different nodes (hosts of GPUs, TPU slices) if there are enough.
      expert: number of devices that share the experts of a mixture. An `"expert"` axis of this size
        follows the shard axes and precedes `"sequence"`. State is sharded over it as well, and what
        `shard_train_state(keep=)` names stays on its devices.
      sequence: number of devices that share the sequence of an example (sequence or context
        parallelism). A `"sequence"` axis of this size comes after the others that gshard shards
        over, so that its devices are adjacent. State is sharded over it as well.
      extra: sizes of your own model-parallel axes by name, such as `{"model": 2}` for tensor
        parallelism. They come last, so that their devices are adjacent. gshard shards nothing over
        them.
      devices: the devices in mesh order. By default all of `jax.devices()`, those of one node next
        to each other. The devices of a TPU torus are ordered by their coordinates, and those that
        share a sequence form a ring of adjacent devices.

    Returns:
      A `jax.sharding.Mesh` whose axes all have the type `Auto`.

    Raises:
      GShardError: a name, a size or a device is not valid, or the sizes do not fit the number of
        devices.

    Example:
      >>> dict(gshard.make_mesh(replica=2).shape)
      {'replica': 2, 'shard': 4}
      >>> gshard.make_mesh(extra={"model": 2}).axis_names
      ('shard', 'model')
      >>> dict(gshard.make_mesh(sequence=4).shape)
      {'shard': 2, 'sequence': 4}
    """
    with doing("make_mesh, for the devices of the other processes", waits=True):
        given = by_node(jax.devices()) if devices is None else devices_of("devices", devices)
    count = len(given)
    replica = check_integer("replica", replica, 1)
    sequence = check_integer("sequence", sequence, 1)
    expert = check_integer("expert", expert, 1)
    model = _axis_sizes("extra", extra, "extra={'model': 2}") if extra else {}
    named = {EXPERT: expert, SEQUENCE: sequence}
    for axis, what in ((EXPERT, "experts"), (SEQUENCE, "sequences")):
        if axis in model:
            raise GShardError(
                f"extra= has an axis {axis!r}, over which gshard shards {what} and state; say "
                f"{axis}={model[axis]} instead, or choose another name for an axis of your own."
            )
    if taken := [axis for axis in model if axis in SHARD_AXES]:
        raise GShardError(
            f"extra= has an axis {taken[0]!r}, a name of gshard's shard axes. Choose another one."
        )
    named = {axis: size for axis, size in named.items() if size > 1}
    for axis, size in named.items():
        if shape is not None and axis in shape:
            raise GShardError(
                f"shape={shown(shape)} has an axis {axis!r} already: leave out {axis}={size}."
            )
    own = named | model
    by_links = shape is None
    if by_links and (found := arrange(given, replica, own)) is not None:
        return _mesh(*found)
    if shape is None:
        needed = replica * math.prod(own.values())
        if count % needed:
            asked = [f"replica={replica}"] * (replica > 1)
            asked += [f"{axis}={size}" for axis, size in named.items()]
            asked += [f"extra={model}"] * bool(model)
            what, s = " and ".join(asked), "s" * (len(asked) == 1)
            if count < needed:
                have = "is 1" if count == 1 else f"are {count}"
                raise GShardError(
                    f"{what} need{s} {needed} devices, and there {have}. On CPU, start the program "
                    f"with gshard.virtual_devices({needed})."
                )
            raise GShardError(
                f"{what} take{s} {needed}, which does not divide the {count} devices. Use a "
                f"divisor of {count}, or pass devices= with a multiple of {needed}."
            )
        shape = {SHARD: count // needed}
    shape = _axis_sizes("shape", shape, str({SHARD: count}))
    if model and set(shape) != {SHARD}:
        raise GShardError(
            f"extra={model} goes with one shard axis, named {SHARD!r}; shape= is {shape}. With "
            "axes of other names put all of them into shape=, "
            f"gshard.make_mesh({shape | own}), and name the axes to shard over: "
            "shard_train_state(..., shard_axes=...)."
        )
    sizes = ({REPLICA: replica} if replica > 1 else {}) | shape | own
    needed = math.prod(sizes.values())
    if needed > count:
        raise GShardError(
            f"the mesh {sizes} needs {needed} devices, and there are {count}. Make an axis "
            f"smaller, or on CPU start with gshard.virtual_devices({needed})."
        )
    if needed < count and devices is not None:
        raise GShardError(
            f"devices= has {count} devices and the mesh {sizes} needs {needed}. Pass exactly the "
            f"devices to use, such as devices=jax.devices()[:{needed}]."
        )
    if needed < count:
        warn(
            f"the mesh {sizes} uses {needed} of {count} devices; {count - needed} stay idle. Pass "
            f"devices=jax.devices()[:{needed}] if that is intended."
        )
    return _mesh(np.array(given[:needed]).reshape(tuple(sizes.values())), list(sizes), by_links)


def _mesh(devices: np.ndarray, names: list[str], by_links: bool = True) -> Mesh:
    if by_links and SEQUENCE in names:
        devices = in_rings(devices, names.index(SEQUENCE))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _axis_sizes(argument: str, given: Any, example: str) -> dict[str, int]:
    if not isinstance(given, Mapping) or not given or not all(isinstance(a, str) for a in given):
        raise GShardError(
            f"{argument}={shown(given)} must give axes their sizes by name, such as "
            f"gshard.make_mesh({example})."
        )
    sizes = {a: check_integer(f"{argument}[{a!r}]", size, 1) for a, size in given.items()}
    if REPLICA in sizes:
        raise GShardError(
            f"{argument}= has an axis {REPLICA!r}; say replica={sizes[REPLICA]} instead."
        )
    return sizes


def refuse_other_context(mesh: Mesh | AbstractMesh) -> None:
    """Refuses to trace in the context of another mesh, or where its axes belong to a user's map."""
    here = jax.sharding.get_abstract_mesh()
    forms = [(x.axis_names, x.axis_sizes, x.axis_types) for x in (here, mesh)]
    if not here.empty and forms[0] != forms[1]:
        raise GShardError(
            "this was called inside a loss, jax.set_mesh, jax.shard_map or jax.pmap, with the axes "
            f"{dict(here.shape)}, and the plan's mesh is {dict(mesh.shape)}. gshard maps over its "
            "axes itself: call it outside, with the global batch."
        )


def virtual_devices(count: int) -> None:
    """Makes JAX start with `count` virtual CPU devices. Call it before anything else uses JAX.

    GPUs and TPUs, if JAX finds any, are used as they are. To leave them out, set
    `JAX_PLATFORMS=cpu`, or start the script with `gshard launch --virtual_devices`.

    Args:
      count: number of CPU devices of this process, 1 or more. The number given to
        `gshard launch --virtual_devices` or `spawn(virtual_devices=)` takes precedence, with a
        warning where they differ.

    Raises:
      GShardError: JAX has already started with fewer devices.

    Example:
      >>> gshard.virtual_devices(8)
      >>> len(jax.devices())
      8
    """
    count = check_integer("count", count, 1)
    launched = os.environ.get("JAX_NUM_CPU_DEVICES", str(count))
    if "GSHARD_LOCAL_PROCESS_ID" in os.environ and launched != str(count):
        if os.environ.get("GSHARD_PROCESS_ID", "0") == "0":
            warn(
                f"virtual_devices({count}) has no effect: this process was started by gshard with "
                f"{launched} virtual CPU devices."
            )
        return
    forced = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    try:
        os.environ.update(thread_variables(count))
        if not forced:
            jax.config.update("jax_num_cpu_devices", count)
            return
    except RuntimeError:
        pass  # JAX has started: the devices that it has decide
    found = int(forced.group(1)) if forced else len(jax.devices("cpu"))
    if found < count:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        if forced:
            raise GShardError(
                f"virtual_devices({count}): XLA_FLAGS asks for {found} CPU devices. Set {flag}, or "
                "take the flag out."
            )
        raise GShardError(
            f"virtual_devices({count}): JAX has already started with {found} CPU devices. Call "
            f"gshard.virtual_devices({count}) at the top of the program, before any other use of "
            f"JAX, or set {flag}."
        )


def devices_of(argument: str, devices: Any, or_else: str = "") -> list[Any]:
    """Checks that an argument is a list of distinct devices; it may also accept `or_else`."""
    given = list(devices) if isinstance(devices, (Sequence, np.ndarray)) else []
    if not given or not all(isinstance(x, jax.Device) for x in given):
        raise GShardError(
            f"{argument}={shown(devices)} must be a list of at least one device, such as "
            f"jax.devices()[:2] or gshard.distributed.new_group([0, 1]){or_else}."
        )
    if len(set(given)) < len(given):
        raise GShardError(
            f"{argument}={shown(devices)} names a device twice. Name each device once."
        )
    return given


_OF_GROUPS = {  # of PyTorch's and Paddle's arguments
    "ranks": "It is devices= here: numbers of devices, not of processes.",
    **dict.fromkeys(("backend", "timeout"), "Leave it out: XLA communicates."),
}


@named_arguments(_OF_GROUPS)
def new_group(devices: Sequence[int]) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the devices with these global indices, for `make_mesh(devices=...)`.

    Args:
      devices: indices into `jax.devices()`, each named once.

    Returns:
      The devices, in the order of the indices.

    Raises:
      GShardError: an index does not exist or is named twice.

    Example:
      >>> group = gshard.distributed.new_group([0, 1, 2, 3])
      >>> gshard.make_mesh(devices=group).size
      4
    """
    every = jax.devices()
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise GShardError(f"new_group({shown(devices)}): pass a list of device indices.")
    if len(set(devices)) < len(devices):
        raise GShardError(f"new_group({devices}): name each device once.")
    for index in devices:
        if dimension(index, len(every)) != index:
            raise GShardError(
                f"new_group({devices}): {index!r} is not a device. There are {len(every)}: 0 to "
                f"{len(every) - 1}."
            )
    return [every[index] for index in devices]
