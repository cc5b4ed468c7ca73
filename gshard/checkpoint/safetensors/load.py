"""`load_safetensors`: a sharded state with the weights of a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from gshard._util.durable import file_path
from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import flag
from gshard.checkpoint.safetensors.format import (
    DTYPES,
    Stored,
    Weight,
    replace_weights,
    tensors_of,
    weights_of,
)
from gshard.distributed.agree import run_on_all
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # of a shard as stored, by dimension
_HINTS = 20  # missing names for which a similar one is suggested: slow among thousands


def load_safetensors(state: Any, path: str | os.PathLike[str], *, cast: bool = False) -> Any:
    """A sharded state with the weights of a safetensors file.

    `gshard.save_safetensors` wrote the file, from a state of any level, mesh and precision, or
    another program with the same names, shapes and dtypes. Parameters, their master copies and the
    collections next to them are replaced, in the layouts of `state`. The step, the optimizer's
    moments (shard a new state for new ones) and random keys are kept.

    One weight at a time is on the host, and only what this process's devices need. With several
    processes all call this, each reads the file, and all return when all have.

    Args:
      state: what `shard_train_state` or a step returned, at any level; for NNX the
        `(model, optimizer)` pair. Its arrays are not changed or freed; the result shares those that
        are kept.
      path: the path of the file.
      cast: True converts a weight of another floating dtype to the state's, and one of another
        integer dtype to the state's.

    Returns:
      A state of the same type and with the same plan; for NNX a new pair.

    Raises:
      GShardError: the file is missing, cut, damaged or not of this format; weights of the state are
        missing in it or it has others; a shape or, without `cast`, a dtype differs; or the
        `safetensors` library is not installed. With several processes every one raises.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> gshard.save_safetensors(state, "weights.safetensors")
      >>> state = gshard.load_safetensors(state, "weights.safetensors")
      >>> bool((gshard.full_params(state)["w"] == 1).all())
      True
    """
    plan = plan_of(state, "load_safetensors")
    if isinstance(plan.mesh, jax.sharding.AbstractMesh):
        raise GShardError("load_safetensors: the plan has an abstract mesh: it has no devices.")

    def read() -> Any:
        convert = flag("cast", cast)
        file = file_path(path, "load_safetensors")
        components = plan.kind.split(state)
        wanted = weights_of(components, plan, "load_safetensors")
        found = tensors_of(file, "load_safetensors")
        _check_fit(found, wanted, file, convert)

        def make(name: str, layout: Layout) -> jax.Array:
            dtypes = (wanted[name].layout.dtype, layout.dtype)  # by way of a master copy's
            return _shard_weight(name, found[name], dtypes, layout, plan)

        return replace_weights(components, plan, make)

    components = run_on_all(read, plan.mesh, call="load_safetensors")
    return plan.kind.merge(components, state, plan.kind.tx(state))


def _check_fit(
    found: Mapping[str, Stored], wanted: Mapping[str, Weight], file: Path, cast: bool
) -> None:
    """Raises a `GShardError` that lists what does not fit: names, then shapes, then dtypes."""
    missing = [name for name in wanted if name not in found]
    added = [name for name in found if name not in wanted]
    if missing or added:
        hints = [f"{name}:{did_you_mean(name, added)}" for name in missing[:_HINTS]]
        hints = [hint for hint in hints if not hint.endswith(":")]
        raise GShardError(
            f"load_safetensors: {file} has other weights than the state. Missing in the file: "
            f"{', '.join(missing) or 'none'}. Not in the state: {', '.join(added) or 'none'}."
            f"{' ' if hints else ''}{' '.join(hints)} Rename, add or remove tensors of the file "
            "(safetensors.numpy.load_file, save_file), or shard a state of the same model."
        )
    shapes = [
        f"{name} is {list(found[name].shape)} in the file and {list(x.shape)} in the state"
        for name, (_, x) in wanted.items()
        if found[name].shape != x.shape
    ]
    dtypes = [
        f"{name} is {found[name].dtype} in the file and {x.dtype} in the state"
        for name, (_, x) in wanted.items()
        if not _fits(DTYPES.get(found[name].dtype), x.dtype, cast)
    ]
    if shapes:
        fix = "Shard a state of the model that the file was written from."
    elif cast:
        fix = "cast=True converts floating dtypes into one another, and integer ones."
    else:
        fix = "Pass cast=True to convert them."
    if wrong := shapes or dtypes:
        raise GShardError(
            f"load_safetensors: {file} has weights of other {'shapes' if shapes else 'dtypes'}: "
            f"{', '.join(wrong)}. {fix}"
        )


def _fits(stored: Any, wanted: Any, cast: bool) -> bool:
    if stored == wanted or stored is None or not cast:
        return stored == wanted
    kinds = (jnp.floating, jnp.integer)
    return any(jnp.issubdtype(stored, k) and jnp.issubdtype(wanted, k) for k in kinds)


def _shard_weight(
    name: str, stored: Stored, dtypes: Sequence[Any], layout: Layout, plan: Plan
) -> jax.Array:
    """One weight in its layout; each shard is read once, padded, and freed after its transfer."""
    sharding, shape = plan.sharding(layout), layout.stored_shape
    devices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, same in devices.items():
        ends = zip(bounds, layout.shape, strict=True)
        inside = tuple(slice(min(a, n), min(b, n)) for (a, b), n in ends)
        x = _padded(_converted(name, stored.read(inside), dtypes), bounds)
        for device in same:
            single = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(x, single, may_alias=False))
        jax.block_until_ready(shards)  # otherwise several shards would be on the host at a time
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _padded(x: np.ndarray, bounds: Bounds) -> np.ndarray:
    widths = [(0, b - a - n) for (a, b), n in zip(bounds, x.shape, strict=True)]
    return np.pad(x, widths) if any(after for _, after in widths) else x


def _converted(name: str, x: np.ndarray, dtypes: Sequence[Any]) -> np.ndarray:
    for dtype in dtypes:
        if x.dtype == dtype:
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is infinite, as in JAX
            new = x.astype(dtype)
        if jnp.issubdtype(dtype, jnp.integer) and (new != x).any():
            raise GShardError(
                f"load_safetensors: {name} holds integers that {dtype} does not. Keep the dtype of "
                "the file in the state."
            )
        x = new
    return x
