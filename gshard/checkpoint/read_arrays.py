"""Reads arrays that Orbax wrote, by TensorStore: each process reads what its devices need.

Orbax reads arrays in the same way, but looks at the tree, its files and its types before, which
takes longer than reading where there are many arrays.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError, OutsideError
from gshard.checkpoint.bounds import Bounds
from gshard.checkpoint.casts import converted
from gshard.checkpoint.place_shards import devices_by_bounds, inside, place_shards

_AHEAD = 2**28  # bytes that are on their way at once; two arrays at least

# What TensorStore adds to an error: of the system, by its number; and its own settings.
# The system's is found in TensorStore's current wording and in an earlier one.
_SYSTEM = re.compile(r"\[os_error_code=|\[OS error ")
_SETTINGS = re.compile(r"\[os_error_code=|\[tensorstore_spec")

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
    opened, waiting = open_arrays(folder, wanted), iter(wanted.items())
    reading: deque[tuple[dict[Bounds, Any], int]] = deque()  # the shards of an array, and its bytes
    arrays, ahead = {}, 0
    for path, x in wanted.items():
        while len(reading) < 2 or ahead < _AHEAD:
            if (following := next(waiting, None)) is None:
                break
            with _explained():
                shards = _shards(opened.pop(following[0]).result(), following[1])
            size = following[1].dtype.itemsize * sum(map(_count, shards))
            reading.append((shards, size))
            ahead += size
        shards, size = reading.popleft()
        # Placed by the user's thread, which has their settings of JAX.
        arrays[path] = place_shards(x, partial(_finished, path, shards, x.dtype), at_once=True)
        ahead -= size
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
        how = {"driver": "zarr3", "kvstore": names, "fill_missing_data_reads": False}
        return ts.open(how, read=True, context=context)

    return {path: opened(path) for path in paths}


def unreadable(error: Exception) -> str:
    """The message of TensorStore or Orbax about unreadable arrays, without its settings."""
    text = " ".join(_SETTINGS.split(str(error))[0].split())
    if len(text) > 300:
        text = f"{text[:150]} ... {text[-150:]}"  # the cause comes last
    return f"cannot be read: {text}."


def _shards(stored: Any, wanted: jax.ShapeDtypeStruct) -> dict[Bounds, Any]:
    """Begins to read each shard, all at once: what several of them are in is read once."""
    return {x: stored[inside(x, stored.shape)].read() for x in devices_by_bounds(wanted)}


def _finished(
    path: str, shards: dict[Bounds, Any], dtype: Any, several: Sequence[Bounds]
) -> list[np.ndarray]:
    with _explained():
        found = [np.asarray(shards.pop(bounds).result()) for bounds in several]
    # TensorStore would let integers overflow.
    return [converted(path, x, dtype) for x in found]


def _count(bounds: Bounds) -> int:
    """The number of entries of a shard."""
    return prod(end - start for start, end in bounds)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _SYSTEM.search(str(error)):
            raise OutsideError(
                f"{unreadable(error)} Check the file system and the limits of this process, and "
                "try again."
            ) from error
        raise GShardError(f"{unreadable(error)} `gshard verify` names the files.") from error
