"""State dicts on disk, by Orbax: logical values, written once, read without pickle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gshard.arguments import shown
from gshard.errors import GShardError

_MARK = "_METADATA"  # Orbax writes it into every directory of its own


def save(state_dict: Mapping[str, Any], path: str | Path) -> None:
    """Writes a state dict into a directory; a directory that `save` wrote before is replaced.

    The old one goes when the new one is complete. With several processes all of them call it, and
    the first writes.

    Args:
      state_dict: of a model or an optimizer, or a dictionary of such: arrays, numbers and strings
        by name.
      path: of the directory.

    Raises:
      GShardError: something else is in the way, or a value cannot be written.
    """
    target = _path(path)
    if not isinstance(state_dict, Mapping):
        raise GShardError(f"save: {shown(state_dict)} is not a state dict, a mapping from names.")
    if target.exists() and not (target.is_dir() and (target / _MARK).exists()):
        kind = "a directory that gshard did not write" if target.is_dir() else "a file"
        raise GShardError(f"save: {target} is {kind}. Choose another path for the directory.")
    values = _writable(state_dict, "")
    new, old = (target.with_name(f"{target.name}.{end}") for end in ("new", "old"))
    _orbax(lambda checkpointer: checkpointer.save(new, values, force=True))
    if jax.process_index() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"gshard.save {target}")


def load(path: str | Path) -> dict[str, Any]:
    """What `save` wrote: NumPy arrays, numbers and strings by name.

    Raises:
      GShardError: there is nothing, or it is damaged.
    """
    target = _path(path)
    old = target.with_name(f"{target.name}.old")
    if not (target / _MARK).exists():
        hint = f" {old} is the one that was being replaced." if (old / _MARK).exists() else ""
        what = "is no directory that gshard.save wrote" if target.exists() else "does not exist"
        raise GShardError(f"load: {target} {what}.{hint}")
    try:
        return _orbax(lambda checkpointer: checkpointer.restore(target))
    except Exception as error:
        raise GShardError(f"load: {target} is damaged: {error}") from error


def _orbax(act: Any) -> Any:
    import orbax.checkpoint as ocp  # takes most of a second

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return act(checkpointer)


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise GShardError(f"path={shown(path)} must be the path of a directory.")
    return Path(path).expanduser().absolute()


def _writable(tree: Mapping[str, Any], inside: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{inside}{name}"
        if not isinstance(name, str):
            raise GShardError(f"save: the key {shown(name)} in {inside or 'it'} is not a string.")
        if isinstance(value, Mapping):
            found[name] = _writable(value, f"{path}/")
        elif isinstance(value, (bool, int, float, str)):
            found[name] = value
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
            found[name] = _array(value, path)
        else:
            raise GShardError(
                f"save: {path} is {shown(value)}. A state dict holds arrays, numbers, strings and "
                "dictionaries of these."
            )
    return found


def _array(value: Any, path: str) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise GShardError(
            f"save: {path} lies over several processes. Take it from state_dict(), which gathers."
        )
    host = np.asarray(value)
    if not (jnp.issubdtype(host.dtype, np.number) or host.dtype == np.bool_):
        raise GShardError(f"save: {path} is no array of numbers, but of {host.dtype}.")
    if not host.size:
        raise GShardError(f"save: {path} has the shape {host.shape}: there is nothing to write.")
    return host
