"""State dicts in a directory: written with checksums, and read again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.arguments import named_arguments
from gshard._util.arrays import is_key
from gshard._util.durable import make_folder, refuse_variables, rename, replace_folder
from gshard._util.errors import GShardError, some
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.checkpoint.checksums import DamagedCheckpointError, find_damages
from gshard.checkpoint.manifest import write_manifests
from gshard.checkpoint.orbax import epath
from gshard.checkpoint.quiet_orbax import orbax_module
from gshard.checkpoint.step_files import StepFolder, store_errors_explained
from gshard.distributed.agree import run_on_all
from gshard.wrapped.state_dict import is_numeric

# Other entries of the user's directory are left alone.
NAME = "gshard_state"
_NEW, _OLD = f".{NAME}.new", f".{NAME}.old"
_MARK = "_METADATA"  # Orbax writes it into every directory of its own
_SAVE = "save of a state dict, which all processes call"


@short_traceback
def save(state_dict: Mapping[str, Any], path: str | Path) -> None:
    """Writes a state dict into a directory, as its entry `gshard_state`, with checksums.

    A previous state dict is deleted once the new one is complete; other entries of the directory
    stay. With several processes all of them make the call, and the first one writes.

    Args:
      state_dict: the state of a model or an optimizer, or nested dictionaries and lists of arrays,
        numbers, strings and None. Tuples come back as lists, and named ones as dictionaries by
        field name; integer keys become strings.
      path: the directory, which is created if needed.

    Raises:
      GShardError: the path is taken by something else, or a value cannot be written.

    Example:
      >>> gshard.paddle.save({"model": params, "epoch": 3}, "weights")
      >>> gshard.paddle.load("weights")["epoch"]
      3
    """
    folder, values = run_on_all(lambda: _prepare(state_dict, path), call=_SAVE)
    run_on_all(lambda: _write(folder, values), call=_SAVE)


def _prepare(state_dict: Any, path: Any) -> tuple[Path, dict[str, Any]]:
    """Returns the directory, which process 0 makes, and what is written into it."""
    folder = _path(path)
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise GShardError(
            f"save: {shown(state_dict)} is not a state dict, a mapping from names, or it is empty. "
            "Give model.state_dict() or optimizer.state_dict()."
        )
    if folder.exists() and not folder.is_dir():
        raise GShardError(f"save: {folder} is a file. Choose another path for the directory.")
    target = folder / NAME
    if target.exists() and not (target / _MARK).exists():
        raise GShardError(f"save: {target} was not written by gshard. Choose another directory.")
    values = _writable(state_dict, "")
    _refuse_same_names(values)
    if jax.process_index() == 0:
        make_folder(folder)
        if not target.exists() and (folder / _OLD / _MARK).exists():
            rename(folder / _OLD, target)  # an earlier call ended between its two renames
    return folder, values


def _write(folder: Path, values: dict[str, Any]) -> None:
    target, new, old = folder / NAME, folder / _NEW, folder / _OLD
    first = jax.process_index() == 0
    try:
        ocp = orbax_module()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(new, values, force=True)
        if first:
            write_manifests(new)
            replace_folder(new, target, old)
    except BaseException:
        for unfinished in folder.glob(f"{_NEW}*") if first else ():  # also Orbax's temporary one
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


_OF_FILES: dict[str, str] = dict.fromkeys(
    ("map_location", "weights_only", "return_numpy"),
    "Leave it out: arrays come as NumPy's, and nothing is unpickled.",
)


@named_arguments(_OF_FILES)
def load(path: str | Path) -> dict[str, Any]:
    """Reads the state dict that `save` wrote into a directory.

    Args:
      path: the directory that was passed to `save`.

    Returns:
      Nested dictionaries and lists of NumPy arrays, numbers, strings and None.

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
    with store_errors_explained():
        bad = find_damages(StepFolder(found[0]))
    if bad:
        raise DamagedCheckpointError(f"load: {found[0]} is damaged: {some(bad)}.", {0: bad})
    try:
        # By the handler: a Checkpointer waits for all processes, and one may load alone.
        return orbax_module().PyTreeCheckpointHandler().restore(epath(found[0]))
    except Exception as error:
        raise GShardError(f"load: {found[0]} is damaged: {error}") from error


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise GShardError(f"path={shown(path)} must be the path of a directory.")
    refuse_variables(path, "path")
    return Path(path).expanduser().resolve()


def _writable(value: Any, path: str) -> Any:
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        value = dict(zip(fields, value, strict=True))
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, x in value.items():
            if type(name) is int and str(name) not in value:  # layers of a list, in NNX
                name = str(name)
            if not isinstance(name, str):
                raise GShardError(f"save: the key {shown(name)} in {path or 'it'} is not a string.")
            found[name] = _writable(x, f"{path}/{name}" if path else name)
        return found
    if isinstance(value, (list, tuple)):
        return [_writable(x, f"{path}/{i}") for i, x in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _array(value, path)
    raise GShardError(
        f"save: {path} is {shown(value)}. A state dict holds arrays, numbers, strings, None, and "
        "dictionaries and lists of these."
    )


def _refuse_same_names(values: dict[str, Any]) -> None:
    """Orbax joins names with a dot, so that `{"a": {"b": x}, "a.b": y}` would be one array."""
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(values)[0]]
    names = [[jax.tree_util.keystr((key,), simple=True) for key in path] for path in keys]
    first: dict[str, list[str]] = {}
    for path in names:
        other = first.setdefault(".".join(path), path)
        if other is not path:
            raise GShardError(
                f"save: {'/'.join(other)} and {'/'.join(path)} would be written as one array, "
                f"{'.'.join(path)}. Rename one of them."
            )


def _array(value: Any, path: str) -> np.ndarray:
    if is_key(value):
        raise GShardError(
            f"save: {path} holds random keys. Save their data, jax.random.key_data(key), and make "
            "keys of it after load: jax.random.wrap_key_data(data)."
        )
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise GShardError(
            f"save: {path} is sharded over several processes. Take it from state_dict(), which "
            "all-gathers."
        )
    host = np.asarray(value)
    if not is_numeric(host):
        raise GShardError(
            f"save: {path} is an array of {host.dtype}. A state dict contains arrays of numbers."
        )
    if not host.size:
        raise GShardError(f"save: {path} has the shape {host.shape}: there is nothing to write.")
    return host
