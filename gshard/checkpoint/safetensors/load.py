"""`load_safetensors`: the weights of a divided state, read from a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from gshard._util.errors import GShardError, did_you_mean, some
from gshard._util.validation import flag
from gshard.checkpoint.safetensors.format import DTYPES, places
from gshard.checkpoint.safetensors.save import file_path
from gshard.checkpoint.safetensors.weights import Weight, replaced, weights_of
from gshard.distributed.agree import run_on_all
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan

Ends: TypeAlias = tuple[
    tuple[int, int], ...
]  # of a part in storage: its first and last + 1 by dimension

_HINTS = 20  # missing names for which the nearest is looked for: that takes long among thousands


def load_safetensors(state: Any, path: str | os.PathLike[str], *, cast: bool = False) -> Any:
    """A divided state with the weights of a safetensors file.

    The file is one of `gshard.save_safetensors`, of a state of any level, mesh and precision, or
    any other of the same names, shapes and dtypes. Parameters, their master copies and the
    collections beside them are replaced, and lie as the plan of `state` says. The rest stays: the
    step, the moments of the optimizer (for a fresh one divide a fresh state), keys of random
    numbers.

    One weight at a time is on the host, and of it what this process's devices need. Over several
    processes all call this, each reads the file, and all return when all have.

    Args:
      state: of `shard_train_state`, at any level; for NNX the `(model, optimizer)` pair. Its arrays
        are neither changed nor freed; the result shares those that stay.
      path: of the file.
      cast: a floating weight may be of another floating dtype in the file, and an integer of
        another integer one; it is converted.

    Returns:
      A state of the same type and with the same plan; for NNX a new pair.

    Raises:
      GShardError: the file is missing, cut, damaged or not of this format; it lacks weights of the
        state or has others; a shape or, without `cast`, a dtype differs; or the `safetensors`
        library is not installed. Over several processes every one raises.
    """
    plan = plan_of(state, "load_safetensors")
    if isinstance(plan.mesh, jax.sharding.AbstractMesh):
        raise GShardError("load_safetensors: the plan has an abstract mesh: it has no devices.")

    def read() -> Any:
        convert = flag("cast", cast)
        file = file_path(path, "load_safetensors")
        parts = plan.kind.split(state)
        wanted = weights_of(parts, plan, "load_safetensors")
        found = tensors_of(file, "load_safetensors")
        _check(found, wanted, file, convert)

        def make(name: str, layout: Layout) -> jax.Array:
            dtypes = (wanted[name].layout.dtype, layout.dtype)  # by way of a master copy's
            return _placed(name, found[name], dtypes, layout, plan)

        return replaced(parts, plan, make)

    parts = run_on_all(read, plan.mesh)
    return plan.kind.merge(parts, state, plan.kind.tx(state))


def _check(
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
            "(safetensors.numpy.load_file, save_file), or divide a state of the same model."
        )
    shapes = [
        f"{name} is {list(found[name].shape)} in the file and {list(x.shape)} in the state"
        for name, (_, x) in wanted.items()
        if found[name].shape != x.shape
    ]
    if shapes:
        raise GShardError(
            f"load_safetensors: {file} has weights of other shapes: {some(shapes, len(shapes))}. "
            "Divide a state of the model that the file was written from."
        )
    fits = _can_cast if cast else _is_same
    dtypes = [
        f"{name} is {found[name].dtype} in the file and {x.dtype} in the state"
        for name, (_, x) in wanted.items()
        if not fits(DTYPES.get(found[name].dtype), x.dtype)
    ]
    if dtypes:
        mend = (
            "cast=True converts floating dtypes into one another, and integer ones."
            if cast
            else "Pass cast=True to convert them."
        )
        raise GShardError(
            f"load_safetensors: {file} has weights of other dtypes: {some(dtypes, len(dtypes))}. "
            f"{mend}"
        )


def _is_same(stored: Any, wanted: Any) -> bool:
    return stored == wanted


def _can_cast(stored: Any, wanted: Any) -> bool:
    kinds = (jnp.floating, jnp.integer)
    return stored == wanted or (
        stored is not None
        and any(jnp.issubdtype(stored, kind) and jnp.issubdtype(wanted, kind) for kind in kinds)
    )


def _placed(
    name: str, stored: Stored, dtypes: Sequence[Any], layout: Layout, plan: Plan
) -> jax.Array:
    """One weight in its layout; a part is read once, padded, and gone when its devices have it."""
    sharding, shape = plan.sharding(layout), layout.stored_shape
    devices: dict[Ends, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        devices.setdefault(ends, []).append(device)
    placed = []
    for ends, same in devices.items():
        x = _padded(_converted(name, stored.read(_inside(ends, layout.shape)), dtypes), ends)
        for device in same:
            place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            placed.append(jax.device_put(x, place, may_alias=False))
        jax.block_until_ready(placed)  # or the parts to come would be on the host beside this one
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _inside(ends: Ends, shape: Sequence[int]) -> tuple[slice, ...]:
    """The part of what lies between `ends` that is no padding."""
    return tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(ends, shape, strict=True))


def _padded(x: np.ndarray, ends: Ends) -> np.ndarray:
    widths = [(0, b - a - n) for (a, b), n in zip(ends, x.shape, strict=True)]
    return np.pad(x, widths) if any(after for _, after in widths) else x


def _converted(name: str, x: np.ndarray, dtypes: Sequence[Any]) -> np.ndarray:
    for dtype in dtypes:
        if x.dtype == dtype:
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # too large: an infinity, as JAX has it
            new = x.astype(dtype)
        if jnp.issubdtype(dtype, jnp.integer) and (new != x).any():
            raise GShardError(
                f"load_safetensors: {name} holds integers that {dtype} does not. Keep the dtype of "
                "the file in the state."
            )
        x = new
    return x


class Stored(NamedTuple):
    """One tensor in a file.

    Attributes:
      path: of the file.
      dtype: in the format's words, such as `"F32"`.
      shape: of the whole tensor.
      offset: the byte of the file that it begins at.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part as an array of its own; no more of the file than that is read.

        By a map of the file and not by the library, which has no NumPy arrays of float8.
        """
        dtype = DTYPES[self.dtype]
        size = [len(range(*s.indices(n))) for s, n in zip(index, self.shape, strict=True)]
        if 0 in size:
            return np.zeros(size, dtype)
        whole = np.memmap(self.path, dtype, "r", self.offset, self.shape)
        return np.array(whole[index])


def tensors_of(file: Path, call: str) -> dict[str, Stored]:
    """The tensors of a file by name, after the safetensors library has found it to be good.

    Raises:
      GShardError: the library is not installed, there is no file, or it is damaged.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise GShardError(
            f"{call} reads with the safetensors library, which is not installed: "
            "pip install 'gshard[export]'."
        ) from error
    if not file.is_file():
        what = "is not a file" if file.exists() else "does not exist"
        raise GShardError(f"{call}: {file} {what}. Pass the path of a safetensors file.")
    try:
        with safe_open(file, framework="numpy"):
            return {name: Stored(file, *place) for name, place in places(file).items()}
    except (SafetensorError, OSError) as error:
        raise GShardError(
            f"{call}: {file} is not a safetensors file, or it was cut short or damaged: "
            f"{error}. Write or copy it anew."
        ) from error
