"""Reads arrays that Orbax wrote, by TensorStore: each process reads what its devices need.

It is what Orbax does for an array, without the trees, files and types that Orbax looks at before;
with these a restore takes 1.6 times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard.checkpoint.bounds import Bounds
from gshard.checkpoint.place_shards import devices_by_bounds, place_shards
from gshard.checkpoint.step_files import THREADS

_AHEAD = max(4, THREADS)  # arrays that are read while one is placed

# Orbax's settings: no values are cached, but the tree of their names is.
_CONTEXT = {
    "file_io_concurrency": {"limit": 128},
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#names": {"total_bytes_limit": 100_000_000},
}


def read_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays by path with the shapes, dtypes and shardings of `wanted`.

    A larger shape than the stored one is padded with zeros, a smaller one is cut.
    """
    paths = [*wanted]
    try:
        opened = open_arrays(folder, paths)
        read, arrays = {}, {}
        for i, path in enumerate(paths):
            for ahead in paths[i + len(read) : i + _AHEAD]:
                read[ahead] = _shards(opened.pop(ahead).result(), wanted[ahead])
            # Placed by the user's thread, which has their settings of JAX.
            arrays[path] = place_shards(wanted[path], partial(_finished, read.pop(path)))
    except Exception as error:
        raise GShardError(f"{unreadable(error)} `gshard verify` names the files.") from error
    return arrays


def open_arrays(folder: Path, paths: Iterable[str]) -> dict[str, Any]:
    """Arrays in a folder of Orbax's by path, as futures of TensorStores."""
    import tensorstore as ts

    context = ts.Context(_CONTEXT)

    def opened(path: str) -> Any:
        names = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder}/"},
            "path": f"{path}/",
            "cache_pool": "cache_pool#names",
        }
        return ts.open({"driver": "zarr3", "kvstore": names}, read=True, context=context)

    return {path: opened(path) for path in paths}


def unreadable(error: Exception) -> str:
    """The message of TensorStore or Orbax about unreadable arrays, without its settings."""
    text = " ".join(str(error).partition("[tensorstore_spec")[0].split())
    return f"cannot be read: {text[:300]}{'...' if len(text) > 300 else ''}."


def _shards(stored: Any, wanted: jax.ShapeDtypeStruct) -> dict[Bounds, Any]:
    """Begins to read each shard, all at once: what several of them are in is read once."""
    import tensorstore as ts

    if stored.dtype.numpy_dtype != wanted.dtype:
        stored = ts.cast(stored, wanted.dtype)

    def inside(bounds: Bounds) -> tuple[slice, ...]:
        ends = zip(bounds, stored.shape, strict=True)
        return tuple(slice(min(a, n), min(b, n)) for (a, b), n in ends)

    return {bounds: stored[inside(bounds)].read() for bounds in devices_by_bounds(wanted)}


def _finished(shards: dict[Bounds, Any], bounds: Bounds) -> np.ndarray:
    return np.asarray(shards.pop(bounds).result())
