"""`make_plan`: what every level takes and sends, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import MOST, check_integer, shown
from gshard.analysis.config import Config
from gshard.analysis.forecast_report import Forecast, LevelForecast
from gshard.analysis.memory.footprint import PLATFORMS, Footprint, footprint, trace_step
from gshard.analysis.setup import (
    Choices,
    TrainSetup,
    as_setup,
    batch_bytes,
    batch_of,
    load_setup,
    sharded_setup,
    step_of,
    without_arrays,
)
from gshard.sharding.budget import Budget, budget, largest_layer
from gshard.sharding.level import LEVELS, parse_levels
from gshard.sharding.mesh import REPLICA, SHARD
from gshard.sharding.plan import Plan


def forecast(
    model: TrainSetup | str | Any,
    devices: int | Mesh | AbstractMesh,
    *,
    levels: str | int | Sequence[str] = tuple(LEVELS),
    arguments: Mapping[str, Any] | None = None,
    replica: int = 1,
    micro_batch_size: int = 1,
    micro_batches: int = 1,
    accumulate: str = "level",
    reshard_after_forward: bool | int = True,
    offload: bool = False,
    activations: bool = True,
    platform: str | None = None,
    report: Callable[[str], object] | None = None,
) -> Forecast:
    """What a train state takes and a step sends at every level.

    Nothing is initialised or compiled, and no device is needed. What lies where and what is sent
    follows from shapes alone, in milliseconds; activations from a trace of the step, in a second or
    two for each level.

    Args:
      model: a `gshard.TrainSetup`, `module:function` that makes one, or what `shard_train_state`
        takes for a state, concrete or abstract.
      devices: how many, or a mesh.
      levels: names; one, or several in one text, with commas.
      arguments: of the function that makes the setup.
      replica: copies of the divided state; goes with a number of devices.
      micro_batch_size: rows that one device takes at a time.
      micro_batches: how many times in one step (k).
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
      offload: as in `shard_train_state`.
      activations: whether to trace the step, where the setup has one.
      platform: whose compiler the peak is to be like, `cpu`, `gpu` or `tpu`; by default that of the
        mesh's devices, and `gpu` without them.
      report: called with the name of every level before it is looked at.

    Raises:
      GShardError: for a model, level or number that cannot be.
    """
    if arguments is not None and not isinstance(model, str):
        raise GShardError(
            f"arguments= are those of the function that 'module:function' names; model is "
            f"{shown(model)}, which takes none."
        )
    if platform is not None and platform not in PLATFORMS:
        raise GShardError(
            f"platform={shown(platform)} is none of {', '.join(PLATFORMS)}."
            f"{did_you_mean(platform, PLATFORMS)}"
        )
    setup = load_setup(model, arguments) if isinstance(model, str) else as_setup(model)
    choices = Choices(micro_batch_size, micro_batches, accumulate, reshard_after_forward, offload)
    if not isinstance(devices, (Mesh, AbstractMesh)):
        devices = abstract_mesh(devices, replica)
    elif replica != 1:
        raise GShardError("replica= goes with a number of devices; here the mesh says it.")
    setup = without_arrays(setup)
    names = parse_levels(levels)
    here = str(devices.devices.flat[0].platform) if isinstance(devices, Mesh) else "gpu"
    plans, found = {}, {}
    for name in names:
        if report is not None:
            report(name)
        state, plan = sharded_setup(setup, devices, name, choices)
        level = of_level(plan, choices, batch_bytes(setup, plan, choices))
        if activations and setup.loss_fn is not None:
            seen = footprint_of(setup, state, plan, choices, platform or here)
            level = dataclasses.replace(level, peak=seen.peak, largest=seen.largest)
        plans[name], found[name] = plan, level
    plan = plans[names[0]]
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(plan.params))
    return Forecast(elements, devices.size, plan.group.replicas, choices, found, plans)


def plan_config(
    config: Config, activations: bool = True, report: Callable[[str], Any] | None = None
) -> Forecast:
    """The forecast for what a command was asked about.

    Args:
      config: what was asked about.
      activations: whether to trace the step.
      report: called with a line of progress for every level.

    Raises:
      GShardError: as `make_plan`, and without a number of devices.
    """
    devices = config.device_count()

    def tracing(level: str) -> None:
        if report is not None:
            report(f"{level}: tracing for {devices} devices")

    found = forecast(
        config.model,
        devices,
        levels=config.levels,
        arguments=config.arguments,
        replica=config.replica,
        activations=activations,
        platform=None if config.target is None else config.target.platform,
        **vars(config.choices),
        report=tracing,
    )
    if config.target is None:
        return found
    usable = config.target.chip.usable
    return dataclasses.replace(found, target=config.target.text, usable=usable)


def abstract_mesh(devices: int, replica: int = 1) -> AbstractMesh:
    """The mesh that `make_mesh(replica=)` makes of so many devices, without them."""
    devices = check_integer("devices", devices, 1, most=MOST)
    replica = check_integer("replica", replica, 1, most=MOST)
    if devices % replica:
        raise GShardError(f"replica={replica} does not divide {devices} devices.")
    sizes, names = (devices // replica,), (SHARD,)
    if replica > 1:
        sizes, names = (replica, *sizes), (REPLICA, *names)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


# How gradients may accumulate and parameters be kept: arguments of `make_train_step` by name.
FLAVOURS: dict[str, dict[str, Any]] = {
    "local": {"accumulate": "local"},
    "scatter": {"accumulate": "scatter"},
    "sync": {"accumulate": "sync"},
    "kept": {"reshard_after_forward": False},
}


def of_level(plan: Plan, choices: Choices, batch: int = 0) -> LevelForecast:
    """What the level of a plan takes and sends, with a batch of so many bytes on a device."""

    def budgeted(**flavour: Any) -> Budget:
        return budget(plan, **{**choices.of_step, **flavour})

    this = budgeted()
    step = sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
    return LevelForecast(
        params=this.resident["params"],
        gradients=this.resident["gradients"],
        optimizer=this.resident["optimizer"] + step,
        non_trainable=this.resident["non_trainable"],
        host=sum(this.host.values()),
        batch=batch,
        gathered=largest_layer(plan),
        wire=this.wire_bytes,
        wire_by_flavour={name: budgeted(**kwargs).wire_bytes for name, kwargs in FLAVOURS.items()},
    )


def footprint_of(
    setup: TrainSetup, state: Any, plan: Plan, choices: Choices, platform: str
) -> Footprint:
    """The footprint of one step on one device.

    Args:
      setup: with a loss and a batch.
      state: divided by `plan`, abstract.
      plan: of an abstract mesh too.
      choices: of the step.
      platform: `cpu`, `gpu` or `tpu`: compilers fuse and order differently.

    Returns:
      Estimates; where the state rests with the host a rough one, of the same step on the device.

    Raises:
      GShardError: the loss cannot be traced with this state and batch.
    """
    if choices.offload:
        return _with_host(setup, plan, choices, platform)
    step = step_of(setup, plan, choices)
    try:
        traced = trace_step(step, state, batch_of(setup, plan, choices))
    except GShardError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise GShardError(
            f"the loss cannot be traced with this state and batch: {type(error).__name__}: "
            f"{''.join(first)}"
        ) from error
    return footprint(traced, plan, platform)


def _with_host(setup: TrainSetup, plan: Plan, choices: Choices, platform: str) -> Footprint:
    """That of the same step on the device, less what rests with the host, and what is fetched.

    An update has one group of arrays on the device and the next on its way.
    """
    near = dataclasses.replace(choices, offload=False)
    state, near_plan = sharded_setup(setup, plan.mesh, plan.level.name, near)
    seen = footprint_of(setup, state, near_plan, near, platform)
    away, window = plan.bytes_per_device["host"], 2 * max(plan.fetched_at_once, default=0)
    return dataclasses.replace(
        seen,
        arguments=seen.arguments - away,
        temporaries=seen.temporaries + window,
        peak=seen.peak - away + window,
    )
