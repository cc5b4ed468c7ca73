"""State dicts of models and optimizers, and the directories that they are saved in."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from gshard._util.durable import make_folder, rename, replace_folder
from gshard._util.errors import GShardError, some
from gshard._util.validation import shown
from gshard.checkpoint.checksums import DamagedCheckpointError, find_damages, write_manifests
from gshard.sharding.mesh import data_group, make_mesh
from gshard.sharding.plan import all_replicated
from gshard.wrapped.named_arrays import (
    NamedArrays,
    check_optimizer,
    full_values,
    name_arrays,
    set_model,
    write,
)
from gshard.wrapped.wrapped_model import Wrapped
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer


def state_dict(target: Any) -> dict[str, Any]:
    """Returns the state of a model or an optimizer, wrapped or not, as full NumPy arrays.

    Args:
      target: an NNX module or an `nnx.Optimizer`.

    Returns:
      Arrays by dotted path. Names and values do not depend on the level or on wrapping.

    Raises:
      GShardError: `target` is neither a model nor an optimizer of NNX.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> gshard.paddle.state_dict(net)["kernel"].shape
      (64, 32)
    """
    if isinstance(target, (Wrapped, WrappedOptimizer)):
        return target.state_dict()
    return full_values(_stored(target, "state_dict"))


def set_state_dict(target: Any, values: Any) -> None:
    """Sets a model or an optimizer, wrapped or not, to the values of a state dict.

    Args:
      target: an NNX module or an `nnx.Optimizer`, changed in place.
      values: what `state_dict` returned, or what `load` read back. Missing and unknown names give
        a warning for a model, and an error for an optimizer.

    Raises:
      GShardError: a value has another shape than the target's, or the names are not those of the
        optimizer. Nothing is changed.

    Example:
      >>> from flax import nnx
      >>> net, other = (nnx.Linear(64, 32, rngs=nnx.Rngs(seed)) for seed in (0, 1))
      >>> gshard.paddle.set_state_dict(other, gshard.paddle.state_dict(net))
      >>> bool((other.kernel[...] == net.kernel[...]).all())
      True
    """
    if isinstance(target, (Wrapped, WrappedOptimizer)):
        target.set_state_dict(values)
        return
    stored = _stored(target, "set_state_dict")
    if isinstance(target, nnx.Module):
        set_model(target, values, stored)
    else:
        check_optimizer(values, stored)
        write(target, values, stored)


def _stored(target: Any, call: str) -> NamedArrays:
    if isinstance(target, nnx.Optimizer):
        tree: Any = {
            "step": target.step.get_value(),
            "inner": nnx.as_pure(target.opt_state),
        }
    elif isinstance(target, nnx.Module):
        tree = nnx.as_pure(nnx.state(target))
    elif hasattr(target, call):
        raise GShardError(f"{call}: a {type(target).__name__} has it itself: target.{call}(...).")
    else:
        raise GShardError(
            f"{call}: {shown(target)} is neither a model nor an optimizer of NNX. The variables of "
            "a Linen module are a tree already: save(variables, path)."
        )
    alone = data_group(make_mesh(devices=jax.devices()[:1]))
    return name_arrays((tree, all_replicated(tree, alone)))


# Other entries of the user's directory are left alone.
NAME = "gshard_state"
_NEW, _OLD = f".{NAME}.new", f".{NAME}.old"
_MARK = "_METADATA"  # Orbax writes it into every directory of its own


def save(state_dict: Mapping[str, Any], path: str | Path) -> None:
    """Writes a state dict into a directory, as its entry `gshard_state`, with checksums.

    A previous state dict is deleted once the new one is complete; other entries of the directory
    stay. With several processes all of them make the call, and the first one writes.

    Args:
      state_dict: the state of a model or an optimizer, or nested dictionaries of arrays, numbers
        and strings. Lists and tuples are written as dictionaries by position or field name,
        without empty entries; integer keys become strings.
      path: the directory, which is created if needed.

    Raises:
      GShardError: the path is taken by something else, or a value cannot be written.

    Example:
      >>> gshard.paddle.save({"model": params, "epoch": 3}, "weights")
      >>> gshard.paddle.load("weights")["epoch"]
      3
    """
    folder = _path(path)
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise GShardError(
            f"save: {shown(state_dict)} is not a state dict, a mapping from names, or it is empty."
        )
    if folder.exists() and not folder.is_dir():
        raise GShardError(f"save: {folder} is a file. Choose another path for the directory.")
    target, new, old = folder / NAME, folder / _NEW, folder / _OLD
    if target.exists() and not (target / _MARK).exists():
        raise GShardError(f"save: {target} was not written by gshard. Choose another directory.")
    values = _writable(state_dict, "")
    first = jax.process_index() == 0
    if first:
        make_folder(folder)
        if not target.exists() and (old / _MARK).exists():
            rename(old, target)  # an earlier call ended between its two renames
    try:
        _orbax(lambda checkpointer: checkpointer.save(new, values, force=True))
        if first:
            write_manifests(new)
            replace_folder(new, target, old)
    except BaseException:
        for unfinished in folder.glob(f"{_NEW}*") if first else ():  # also Orbax's temporary one
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"gshard save {folder}")


def load(path: str | Path) -> dict[str, Any]:
    """Reads the state dict that `save` wrote into a directory.

    Args:
      path: the directory that was passed to `save`.

    Returns:
      Nested dictionaries of NumPy arrays, numbers and strings.

    Raises:
      DamagedCheckpointError: a file does not match its checksum.
      GShardError: the directory is missing or contains no saved state dict.

    Example:
      >>> gshard.paddle.save(params, "weights")
      >>> gshard.paddle.load("weights")["w"].shape
      (64, 32)
    """
    folder = _path(path)
    found = [folder / name for name in (NAME, _OLD) if (folder / name / _MARK).exists()]
    if not found:
        what = "contains no saved state dict" if folder.exists() else "does not exist"
        raise GShardError(f"load: {folder} {what}. Pass the path that save() was given.")
    if bad := find_damages(found[0]):
        raise DamagedCheckpointError(f"load: {found[0]} is damaged: {some(bad)}.", {0: bad})
    try:
        return _orbax(lambda checkpointer: checkpointer.restore(found[0]))
    except Exception as error:
        raise GShardError(f"load: {found[0]} is damaged: {error}") from error


def _orbax(act: Any) -> Any:
    import orbax.checkpoint as ocp  # takes most of a second

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return act(checkpointer)


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise GShardError(f"path={shown(path)} must be the path of a directory.")
    return Path(path).expanduser().resolve()


def _writable(tree: Mapping[str, Any], inside: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{inside}{name}"
        if type(name) is int and str(name) not in tree:  # layers of a list, in NNX
            name = str(name)
        if not isinstance(name, str):
            raise GShardError(f"save: the key {shown(name)} in {inside or 'it'} is not a string.")
        if isinstance(value, (list, tuple)):
            if jax.tree.leaves(value):
                found[name] = _writable(_by_name(value), f"{path}/")
        elif isinstance(value, Mapping):
            if not value:
                raise GShardError(f"save: {path} is empty: there is nothing to write.")
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


def _by_name(values: Any) -> dict[str, Any]:
    """The entries of a sequence by number, of a named tuple by field."""
    names = getattr(values, "_fields", map(str, range(len(values))))
    entries = zip(names, values, strict=True)
    return {name: x for name, x in entries if jax.tree.leaves(x)}


def _array(value: Any, path: str) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise GShardError(
            f"save: {path} is sharded over several processes. Take it from state_dict(), which "
            "all-gathers."
        )
    host = np.asarray(value)
    if not (jnp.issubdtype(host.dtype, np.number) or host.dtype == np.bool_):
        raise GShardError(
            f"save: {path} is an array of {host.dtype}. A state dict contains arrays of numbers."
        )
    if not host.size:
        raise GShardError(f"save: {path} has the shape {host.shape}: there is nothing to write.")
    return host
