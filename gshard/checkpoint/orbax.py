"""Arrays on disk, by Orbax: each process writes its shards.

It also reads checkpoints of a Flax `TrainState` that Orbax wrote without gshard.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard._util.validation import flag, shown
from gshard.checkpoint import array_ranges
from gshard.checkpoint.arrays import (
    FROZEN_PARAMS,
    PARAMS,
    ArrayInfo,
    layouts_of,
    state_and_plan,
    with_components,
)
from gshard.checkpoint.casts import converted
from gshard.checkpoint.manifest import Range
from gshard.checkpoint.matching import read_components
from gshard.checkpoint.quiet_orbax import orbax_module
from gshard.checkpoint.read_arrays import unreadable
from gshard.checkpoint.step_info import refuse_step
from gshard.train.shard_train_state import shard_leaf
from gshard.train_state.components import ShardedOptState

ARRAYS = "arrays"  # Orbax's folder within a step
METADATAS = f"{ARRAYS}/array_metadatas"  # with a file of each process
_TREE = "_METADATA"  # Orbax writes it into the folder of every tree


def write(step: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Copies this process's shards to the host, and begins to write them into an existing folder.

    After this returns, the arrays may be donated or deleted. On a GPU those in host memory may be
    donated only when they are written: Orbax reads them where they are (`host_copy`). The function
    that is returned waits until this process's shards are written.
    """
    ocp = orbax_module()

    arguments = ocp.args.PyTreeSave(dict(arrays))
    saving = _handler().async_save(epath(step / ARRAYS), args=arguments)
    with ThreadPoolExecutor(1) as thread:  # that of a notebook has an event loop already
        futures = thread.submit(asyncio.run, saving).result() or []

    def finish() -> None:
        errors = []
        for future in futures:  # all of them: one that goes on would write into a removed folder
            try:
                future.result()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return finish


def merge(step: Path) -> None:
    """Combines what all processes have written; called by the first."""
    _handler().finalize(epath(step / ARRAYS))


def files_of(step: Path, process: int) -> list[str]:
    """The paths of the files that one process wrote, within the step."""
    found = [*(step / ARRAYS / _own_folder(process)).rglob("*")]
    found.append(step / METADATAS / f"process_{process}")
    return [path.relative_to(step).as_posix() for path in found if path.is_file()]


def ranges_of(step: Path, process: int, arrays: Collection[str]) -> dict[str, list[Range]]:
    """The bytes of each array in each file of a process."""
    folder = f"{ARRAYS}/{_own_folder(process)}"
    if not (step / folder).is_dir():  # it has only copies of what others write
        return {}
    return array_ranges.ranges_of(step / folder, folder, arrays)


def _how_to_read(wanted: jax.ShapeDtypeStruct) -> Any:
    ocp = orbax_module()

    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=wanted.sharding,
        global_shape=wanted.shape,
        dtype=wanted.dtype,
        strict=False,  # it may have other padding
    )


def _own_folder(process: int) -> str:
    return f"ocdbt.process_{process}"


def _handler() -> Any:
    ocp = orbax_module()

    # Weights hardly compress; without it, writing is as fast as the disk.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def epath(folder: Path) -> Any:
    """Returns a path in the form that Orbax's handlers take."""
    from etils import epath

    return epath.Path(folder)


def import_orbax(path: str | os.PathLike[str], like: Any, *, cast: bool = False) -> Any:
    """Reads a `TrainState` that plain Orbax saved, onto any mesh and at any level.

    It reads parameters, optimizer state, step and further fields; each process reads what its
    devices need, and integers of another dtype in full. Such a checkpoint has no checksums, so
    damage may go unnoticed.

    Args:
      path: the folder of the tree, as `StandardCheckpointer` or `PyTreeCheckpointer` wrote it, or
        of a step of a `CheckpointManager`.
      like: what `shard_train_state` returned for a Linen `TrainState`: the state; or, without
        arrays, its plan or `(abstract state, plan)`.
      cast: True converts arrays of another floating dtype, and of another integer dtype.

    Returns:
      A train state like `like`, with the arrays of the checkpoint.

    Raises:
      GShardError: there is no such tree, or it is of another model or optimizer; each array that
        differs is named by its path; or an integer does not fit its dtype.

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
    ocp = orbax_module()

    state, plan = state_and_plan(like, "import_orbax(path, like)")
    flag("cast", cast)
    folder = _tree_in(path)
    handler = ocp.PyTreeCheckpointHandler()
    try:
        tree: Any = handler.metadata(epath(folder)).tree
    except Exception as error:
        raise GShardError(f"import_orbax: {folder} {unreadable(error)}") from error
    paths, described, structure = flatten(tree)
    layouts = layouts_of(plan)
    names = [_own_name(name, layouts) for name in paths]
    stored: dict[str, ArrayInfo] = {}
    integers: dict[str, Any] = {}  # their dtypes on disk
    for name, x in zip(names, described, strict=True):
        if not hasattr(x, "shape") or x.dtype is None:
            continue
        shape, dtype = tuple(x.shape), str(np.dtype(x.dtype))
        if jnp.issubdtype(x.dtype, jnp.integer):
            integers[name] = x.dtype
        # Python's own numbers were saved as 64 bits of their kind.
        if shape == () and name in layouts and dtype in ("int64", "float64"):
            own = str(layouts[name].dtype)
            dtype = own if dtype.rstrip("64") in own else dtype
        stored[name] = ArrayInfo(shape, dtype)

    def read_tree(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        items = [wanted.get(name, ocp.PLACEHOLDER) for name in names]
        whole = {n for n in wanted if integers.get(n, wanted[n].dtype) != wanted[n].dtype}
        how = [
            ocp.RestoreArgs(restore_type=np.ndarray)
            if name in whole
            else _how_to_read(wanted[name])
            if name in wanted
            else ocp.RestoreArgs()
            for name in names
        ]
        arguments = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(structure, items),
            restore_args=jax.tree.unflatten(structure, how),
        )
        try:
            found = handler.restore(epath(folder), args=arguments)
        except Exception as error:
            raise GShardError(unreadable(error)) from error
        leaves = dict(zip(names, structure.flatten_up_to(found), strict=True))
        for n in whole:  # Orbax would let them wrap around
            new = converted(n, np.asarray(leaves[n]), wanted[n].dtype)
            own = n if n in layouts else n.replace(PARAMS, FROZEN_PARAMS, 1)  # integers are frozen
            leaves[n] = shard_leaf(new, layouts[own], plan)
        return {name: leaves[name] for name in wanted}

    paths, leaves, _ = flatten({"opt_state": ShardedOptState(None, {})})
    fresh = dict(zip(paths, leaves, strict=True))
    try:
        components = read_components(read_tree, stored, plan, cast, fresh)
    except GShardError as error:
        raise GShardError(f"import_orbax: {folder}: {error}") from error
    return with_components(components, state, plan)


def _own_name(path: str, known: Collection[str]) -> str:
    """Gshard's path of an array of a `TrainState`, without the `value` of a Linen box."""
    field, _, rest = path.partition("/")
    if field == "opt_state":
        path = f"opt_state/inner/{rest}"
    elif field not in ("params", "step"):
        path = f"non_trainable/{path}"
    unboxed = path.removesuffix("/value")
    if path.startswith(f"{PARAMS}params/") and path not in known:  # beside fp8 statistics
        path = path.replace(f"{PARAMS}params/", PARAMS, 1)
    return unboxed if unboxed in known else path


def _tree_in(path: Any) -> Path:
    """The folder of the tree at or below a user's path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise GShardError(f"import_orbax: path={shown(path)} must be the path of a folder.")
    if "://" in str(path):
        raise GShardError(
            f"import_orbax: {path} is an address, and Orbax checkpoints are read from folders "
            "only. Copy it into one, and pass the path of that."
        )
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise GShardError(f"import_orbax: {folder} {what}.")
    refuse_step(folder.parent if folder.name == ARRAYS else folder, "import_orbax")
    if (folder / _TREE).exists():
        return folder
    inside = [x for x in sorted(folder.iterdir()) if (x / _TREE).exists()]
    if len(inside) == 1 and not inside[0].name.isdigit():
        return inside[0]
    names = [x.name for x in inside or sorted(folder.iterdir()) if x.is_dir()]
    raise GShardError(
        f"import_orbax: {folder} is not the folder of one saved tree of arrays. It holds "
        f"{some(names) or 'nothing'}. Pass the folder of one tree, including its step."
    )
