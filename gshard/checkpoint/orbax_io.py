"""Arrays on disk, by Orbax: each process writes its shards, and reads what its devices need."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard.checkpoint.checksums import Range

ARRAYS = "arrays"  # Orbax's folder within a step

_VALUE = re.compile(r"value::([^:]*):(\d+):(\d+)")


def write(step: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Copies this process's shards to the host and begins to write them.

    After this returns, the arrays may be donated or deleted.

    Args:
      step: an existing folder, the same on every process.
      arrays: the global arrays, by path.

    Returns:
      A function that waits until this process's shards are written.
    """
    import orbax.checkpoint as ocp  # takes most of a second

    arguments = ocp.args.PyTreeSave(dict(arrays))
    futures = _run(_handler().async_save(_folder(step), args=arguments)) or []

    def finish() -> None:
        for future in futures:
            future.result()

    return finish


def finish(step: Path) -> None:
    """Combines what all processes have written; called by the first."""
    _handler().finalize(_folder(step))


def read(step: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays by path with the shapes, dtypes and shardings of `wanted`.

    A larger shape than the stored one is padded with zeros, a smaller one is cut.

    Raises:
      GShardError: the arrays are damaged or deleted.
    """
    import orbax.checkpoint as ocp

    how = {path: how_to_read(x) for path, x in wanted.items()}
    arguments = ocp.args.PyTreeRestore(item=dict(wanted), restore_args=how, partial_restore=True)
    try:
        return _handler().restore(_folder(step), args=arguments)
    except Exception as error:
        raise GShardError(f"{unreadable(error)} `gshard verify` names the files.") from error


def differing_arrays(step: Path, arrays: Mapping[str, jax.Array]) -> list[str]:
    """Paths of the arrays whose bits differ from the stored ones; one is read at a time.

    Raises:
      GShardError: the stored arrays are damaged or deleted.
    """
    found = []
    for path, x in arrays.items():
        wanted = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        pairs = zip(
            x.addressable_shards,
            read(step, {path: wanted})[path].addressable_shards,
            strict=True,
        )
        if any(a.replica_id == 0 and _bits(a.data) != _bits(b.data) for a, b in pairs):
            found.append(path)
    return found


def how_to_read(wanted: jax.ShapeDtypeStruct) -> Any:
    """Orbax's options for reading one array."""
    import orbax.checkpoint as ocp

    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=wanted.sharding,
        global_shape=wanted.shape,
        dtype=wanted.dtype,
        strict=False,  # it may have other padding
    )


def unreadable(error: Exception) -> str:
    """The message of TensorStore or Orbax about unreadable arrays, without its settings."""
    text = " ".join(str(error).partition("[tensorstore_spec")[0].split())
    return f"cannot be read: {text[:300]}{'...' if len(text) > 300 else ''}."


def files_of(step: Path, process: int) -> list[str]:
    """The paths of the files that one process wrote, within the step."""
    own = step / ARRAYS / _own_folder(process)
    found = [path for path in own.rglob("*") if path.is_file()]
    return [path.relative_to(step).as_posix() for path in found]


def ranges_of(step: Path, process: int, arrays: Collection[str]) -> dict[str, list[Range]]:
    """The bytes of each array in each file of a process that wrote files.

    Orbax's format is OCDBT: a tree of keys, such as `params/w/c/0/1` for a block of an array, with
    the file, the offset and the length of each value.
    """
    import tensorstore as ts

    folder = f"{ARRAYS}/{_own_folder(process)}"
    spec = {"driver": "file", "path": f"{step / folder}/"}
    store = ts.KvStore.open(spec).result()
    found: dict[str, list[Range]] = {}

    def walk(location: str, prefix: bytes) -> None:
        for entry in ts.ocdbt.dump(store, location).result()["entries"]:
            key = prefix + entry["key"]
            if "location" in entry:
                walk(entry["location"], key[: len(prefix) + entry["subtree_common_prefix_length"]])
            elif value := _VALUE.fullmatch(entry.get("indirect_value", "")):
                name = f"{folder}/{value[1]}"
                array = _array_of(key.decode(), arrays)
                if array is not None:
                    found.setdefault(name, []).append((int(value[2]), int(value[3]), array))

    newest = ts.ocdbt.dump(store).result()["versions"][-1]["root"]
    if "location" in newest:
        walk(newest["location"], b"")
    return found


def _bits(x: jax.Array) -> bytes:
    return np.asarray(x).tobytes()


def _own_folder(process: int) -> str:
    return f"ocdbt.process_{process}"


def _array_of(key: str, arrays: Collection[str]) -> str | None:
    """The array whose block a key names. The path of an array may itself look like a block."""
    while key not in arrays and key:
        key = key.rpartition("/")[0]
    return key or None


def _handler() -> Any:
    import orbax.checkpoint as ocp

    # Weights hardly compress; without it, writing is as fast as the disk.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def _folder(step: Path) -> Any:
    from etils import epath  # Orbax's own paths

    return epath.Path(os.fspath(step / ARRAYS))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a thread, because the thread of a notebook has an event loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
