"""Reads checkpoints of a Flax `TrainState` that Orbax wrote without gshard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard._util.validation import flag, shown
from gshard.checkpoint.arrays import (
    ArrayInfo,
    layouts_of,
    read_components,
    state_and_plan,
    with_components,
)
from gshard.checkpoint.directory import MANIFEST
from gshard.checkpoint.orbax_io import ARRAYS, how_to_read, unreadable
from gshard.train_state.components import ShardedOptState

_TREE = "_METADATA"  # Orbax writes it into the folder of every tree


def import_orbax(path: str | os.PathLike[str], like: Any, *, cast: bool = False) -> Any:
    """Reads a `TrainState` that plain Orbax saved, onto any mesh and at any level.

    It reads parameters, optimizer state, step and further fields; each process reads what its
    devices need. Such a checkpoint has no checksums, so damage may go unnoticed.

    Args:
      path: the folder of the tree, as `StandardCheckpointer` or `PyTreeCheckpointer` wrote it, or
        of a step of a `CheckpointManager`.
      like: what `shard_train_state` returned for a Linen `TrainState`: the state, or
        `(abstract state, plan)`.
      cast: True converts arrays of another dtype.

    Returns:
      A train state like `like`, with the arrays of the checkpoint.

    Raises:
      GShardError: there is no such tree, or it is of another model or optimizer; each array that
        differs is named by its path.

    Example:
      >>> import os, orbax.checkpoint as ocp
      >>> from flax.training.train_state import TrainState
      >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(os.path.abspath("old"), state)
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state(state, mesh, "p_g_os", min_shard_size=0)
      >>> state = gshard.import_orbax("old", like=state)
    """
    import orbax.checkpoint as ocp
    from etils import epath

    state, plan = state_and_plan(like, "import_orbax(path, like)")
    flag("cast", cast)
    folder = _tree_in(path)
    handler = ocp.PyTreeCheckpointHandler()
    try:
        tree: Any = handler.metadata(epath.Path(folder)).tree
    except Exception as error:
        raise GShardError(f"import_orbax: {folder} {unreadable(error)}") from error
    paths, described, structure = flatten(tree)
    names = [_own_name(name) for name in paths]
    stored = {
        name: ArrayInfo(tuple(x.shape), str(np.dtype(x.dtype)))
        for name, x in zip(names, described, strict=True)
        if hasattr(x, "shape") and x.dtype is not None
    }

    def read(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        items = [wanted.get(name, ocp.PLACEHOLDER) for name in names]
        how = [_how(wanted.get(name)) for name in names]
        arguments = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(structure, items),
            restore_args=jax.tree.unflatten(structure, how),
        )
        try:
            found = handler.restore(epath.Path(folder), args=arguments)
        except Exception as error:
            raise GShardError(unreadable(error)) from error
        leaves = structure.flatten_up_to(found)
        return {name: x for name, x in zip(names, leaves, strict=True) if name in wanted}

    new = ShardedOptState(None, {})
    fresh = zip(*flatten({"opt_state": new})[:2], strict=True)
    layouts = layouts_of(plan)
    for name, info in stored.items():
        # Python's own numbers were saved as 64 bits of their kind.
        if info.shape == () and name in layouts and info.dtype in ("int64", "float64"):
            if info.dtype.rstrip("64") in str(layouts[name].dtype):
                stored[name] = ArrayInfo((), str(layouts[name].dtype))
    try:
        components = read_components(read, stored, plan, cast, dict(fresh))
    except GShardError as error:
        raise GShardError(f"import_orbax: {folder}: {error}") from error
    return with_components(components, state, plan)


def _own_name(path: str) -> str:
    """Gshard's path of an array of a `TrainState`."""
    field, _, rest = path.partition("/")
    if field == "opt_state":
        return f"opt_state/inner/{rest}"
    return path if field in ("params", "step") else f"non_trainable/{path}"


def _how(wanted: jax.ShapeDtypeStruct | None) -> Any:
    import orbax.checkpoint as ocp

    return ocp.RestoreArgs() if wanted is None else how_to_read(wanted)


def _tree_in(path: Any) -> Path:
    """The folder of the tree at or below a user's path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise GShardError(f"import_orbax: path={shown(path)} must be the path of a folder.")
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise GShardError(f"import_orbax: {folder} {what}.")
    step = folder.parent if folder.name == ARRAYS else folder
    if (step / MANIFEST).exists():
        raise GShardError(
            f"import_orbax: {step} is a step of gshard.Checkpointer. Read it with "
            f"gshard.Checkpointer({str(step.parent)!r}).restore(step={step.name}, like=...)."
        )
    if (folder / _TREE).exists():
        return folder
    inside = [x for x in sorted(folder.iterdir()) if (x / _TREE).exists()]
    if len(inside) == 1 and not inside[0].name.isdigit():
        return inside[0]
    names = [x.name for x in inside or sorted(folder.iterdir()) if x.is_dir()]
    raise GShardError(
        f"import_orbax: {folder} holds no single tree of arrays, but {some(names) or 'nothing'}. "
        "Pass the folder of one, with its step."
    )
