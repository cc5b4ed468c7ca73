"""`forecast` estimates the memory and traffic of a train step at every level from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard._util.errors import ArgumentTypeError, GShardError, did_you_mean
from gshard._util.tracebacks import at_line, short_traceback
from gshard._util.validation import MOST_DEVICES, check_integer, shown
from gshard.analysis.config import Config
from gshard.analysis.forecast_report import Forecast, LevelForecast
from gshard.analysis.memory.footprint import (
    PLATFORMS,
    Footprint,
    footprint,
    trace_step,
)
from gshard.analysis.setup import (
    Choices,
    TrainSetup,
    as_setup,
    batch_bytes,
    batch_of,
    check_kept_axis,
    load_setup,
    sharded_setup,
    step_of,
    without_arrays,
)
from gshard.sharding.budget import budget, largest_layer
from gshard.sharding.level import LEVELS, parse_levels
from gshard.sharding.nodes import nodes_of
from gshard.sharding.plan import Plan
from gshard.sharding.topology import EXPERT, REPLICA, SEQUENCE, SHARD
from gshard.sharding.wire import refuse_mixed_axes


@short_traceback
def forecast(
    model: TrainSetup | str | Any,
    devices: int | Mesh | AbstractMesh,
    *,
    levels: str | int | Sequence[str] = tuple(LEVELS),
    arguments: Mapping[str, Any] | None = None,
    replica: int = 1,
    sequence: int = 1,
    expert: int = 1,
    keep: Mapping[str, tuple[str, int]] | None = None,
    micro_batch_size: int = 1,
    micro_batches: int = 1,
    accumulate: str = "level",
    reshard_after_forward: bool | int = True,
    offload: bool = False,
    activations: bool = True,
    platform: str | None = None,
    devices_per_node: int | None = None,
    report: Callable[[str], object] | None = None,
) -> Forecast:
    """Forecasts the memory and traffic of a train step at every level.

    Nothing is initialized or compiled, and no device is needed. Layouts and traffic follow from
    shapes alone, in milliseconds; activations from a trace of the step, in a second or two for each
    level. On a mesh with model-parallel axes nothing is traced: XLA decides what each device of
    these computes and sends.

    Args:
      model: a `gshard.TrainSetup`, the name `module:function` of a function that returns one, or a
        train state as `shard_train_state` takes it, concrete or abstract.
      devices: the number of devices, or a mesh.
      levels: names of levels, as a sequence or as one text with commas.
      arguments: keyword arguments of the function that `model` names.
      replica: number of replicas of the sharded state, if `devices` is a number.
      sequence: devices that share the sequence of an example, if `devices` is a number.
      expert: devices that share the experts of a mixture, if `devices` is a number.
      keep: which parameters are kept on an axis, as in `shard_train_state`, instead of the setup's.
      micro_batch_size: examples of one micro-batch on one device, or on those that share them.
      micro_batches: number of micro-batches in one step (k).
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
      offload: as in `shard_train_state`.
      activations: whether to trace the step, if the setup has a loss.
      platform: the compiler to model, `cpu`, `gpu` or `tpu`; by default that of the mesh's devices,
        or `gpu` without devices.
      devices_per_node: how many adjacent devices of the mesh share fast links, as in
        `gshard.budget`.
      report: called with the name of each level before its forecast.

    Returns:
      The forecast; print it for a report. All amounts are bytes of one device.

    Raises:
      GShardError: the model, a level or a number is not valid, or the loss cannot be traced.

    Example:
      >>> setup = gshard.TrainSetup((params, tx), loss_fn, batch, shard={"min_shard_size": 0})
      >>> found = gshard.forecast(setup, devices=8, levels="os,p_g_os", micro_batch_size=4)
      >>> found.levels["p_g_os"].peak > 0
      True
      >>> "Memory of one device" in str(found)
      True
    """
    if arguments is not None and not isinstance(model, str):
        raise GShardError(
            f"arguments= are those of the function that 'module:function' names; model is "
            f"{shown(model)}, which takes none."
        )
    if report is not None and not callable(report):
        raise ArgumentTypeError(
            f"report={shown(report)} is not a function. Pass one that takes the name of a level, "
            "such as print."
        )
    if platform is not None and platform not in PLATFORMS:
        raise GShardError(
            f"platform={shown(platform)} is none of {', '.join(PLATFORMS)}."
            f"{did_you_mean(platform, PLATFORMS)}"
        )
    setup = load_setup(model, arguments) if isinstance(model, str) else as_setup(model)
    choices = Choices(
        micro_batch_size,
        micro_batches,
        accumulate,
        reshard_after_forward,
        offload,
        {} if keep is None else keep,
    )
    axes = {REPLICA: replica, SEQUENCE: sequence, EXPERT: expert}
    if not isinstance(devices, (Mesh, AbstractMesh)):
        devices = abstract_mesh(devices, **axes)
        check_kept_axis(expert, choices)
    elif given := next((name for name, size in axes.items() if size != 1), None):
        raise GShardError(
            f"{given}= goes with a number of devices; devices= is a mesh, which has its own "
            f"{given} axis. Leave {given}= out."
        )
    setup = without_arrays(setup)
    names = parse_levels(levels)
    here = str(devices.devices.flat[0].platform) if isinstance(devices, Mesh) else "gpu"
    plans, found = {}, {}
    for name in names:
        if report is not None:
            report(name)
        try:
            state, plan = sharded_setup(setup, devices, name, choices)
        except GShardError as error:
            if not found:
                raise
            raise GShardError(
                f"level {name}: {error} To plan the levels before it, pass "
                f"levels={','.join(found)!r}."
            ) from error
        batch = batch_bytes(setup, plan, choices)
        level = level_forecast(plan, choices, batch, devices_per_node)
        if activations and setup.loss_fn is not None and not plan.group.model_axes:
            where = platform or here, devices_per_node
            seen = footprint_of(setup, state, plan, choices, *where)
            level = dataclasses.replace(
                level,
                peak=seen.peak,
                wire=seen.wire_bytes,
                network=seen.network_bytes,
            )
        plans[name], found[name] = plan, level
    plan = plans[names[0]]
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(plan.params))
    nodes = nodes_of(devices, devices_per_node).count
    group = plan.group
    return Forecast(
        elements,
        devices.size,
        group.replicas,
        choices,
        found,
        plans,
        nodes=nodes,
        sequence=group.sequence,
        experts=group.experts,
    )


def forecast_config(
    config: Config, activations: bool = True, report: Callable[[str], object] | None = None
) -> Forecast:
    """Returns the forecast of a config; `report` is called with a line of progress per level."""
    devices, target = config.device_count(), config.target
    found = forecast(
        config.model,
        devices,
        levels=config.levels,
        arguments=config.arguments,
        replica=config.replica,
        sequence=config.sequence,
        expert=config.expert,
        activations=activations,
        platform=None if target is None else target.platform,
        devices_per_node=None if target is None else target.devices_per_node,
        **vars(config.choices),
        report=report and (lambda level: report(f"{level}: tracing for {devices} devices")),
    )
    if target is None:
        return found
    return dataclasses.replace(
        found,
        target=target.text,
        usable=target.memory,
        host_usable=int(target.chip.host_memory),
    )


def abstract_mesh(
    devices: int, replica: int = 1, sequence: int = 1, expert: int = 1
) -> AbstractMesh:
    """Returns the mesh of `make_mesh` with these axes, without needing its devices."""
    devices = check_integer("devices", devices, 1, most=MOST_DEVICES)
    given = {REPLICA: replica, EXPERT: expert, SEQUENCE: sequence}
    given = {name: check_integer(name, size, 1, most=MOST_DEVICES) for name, size in given.items()}
    for name, size in given.items():
        if devices % size:
            raise GShardError(f"{name}={size} does not divide {devices} devices.")
    taken = math.prod(given.values())
    if devices % taken:
        what = " times ".join(f"{name}={size}" for name, size in given.items() if size > 1)
        raise GShardError(f"{what} does not divide {devices} devices.")
    sizes = {REPLICA: replica, SHARD: devices // taken} | given
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def level_forecast(
    plan: Plan, choices: Choices, batch: int = 0, devices_per_node: int | None = None
) -> LevelForecast:
    """Returns the forecast of a plan's level, with `batch` bytes of examples on one device."""
    if devices_per_node is not None:  # the mesh of a plan may have no devices that say it
        named = "wire= or scatter_dtype="
        refuse_mixed_axes(plan.grads, nodes_of(plan.mesh, devices_per_node), named)
    this = budget(plan, **choices.of_step, devices_per_node=devices_per_node)
    step = sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
    return LevelForecast(
        params=this.resident["params"],
        gradients=this.resident["gradients"],
        optimizer=this.resident["optimizer"] + step,
        non_trainable=this.resident["non_trainable"],
        host=sum(this.host.values()),
        batch=batch,
        gathered=largest_layer(plan, choices.reshard_after_forward),
        wire=this.wire_bytes,
        network=this.network_bytes,
    )


def footprint_of(
    setup: TrainSetup,
    state: Any,
    plan: Plan,
    choices: Choices,
    platform: str,
    devices_per_node: int | None = None,
) -> Footprint:
    """Estimates the footprint of one step on one device; the mesh of the plan may be abstract.

    With `offload` the estimate is rough: that of the same step without it, minus what the host
    stores, plus what an update fetches. It has one group of arrays on the device while the next
    one is transferred.
    """
    if choices.offload:
        near = dataclasses.replace(choices, offload=False)
        near_state, near_plan = sharded_setup(setup, plan.mesh, plan.level.name, near)
        seen = footprint_of(setup, near_state, near_plan, near, platform, devices_per_node)
        on_host, window = plan.bytes_per_device["host"], 2 * max(plan.fetched_at_once, default=0)
        return dataclasses.replace(
            seen,
            arguments=seen.arguments - on_host,
            temporaries=seen.temporaries + window,
            peak=seen.peak - on_host + window,
        )
    step = step_of(setup, plan, choices)
    try:
        traced = trace_step(step, state, batch_of(setup, plan, choices))
    except GShardError:
        raise
    except Exception as error:
        first = "".join(str(error).strip().splitlines()[:1])
        raise GShardError(
            f"the loss cannot be traced with this state and batch{at_line(error)}: "
            f"{type(error).__name__}: {first}"
        ) from error
    return footprint(traced, plan, platform, devices_per_node)
