"""The shards of one process in two files: `shards`, their bytes, and `shards.json`, what they are.

Orbax writes each shard once over all processes. Here each machine keeps what its own devices hold,
so that it can go on without the others; a copy that a replica needs is on its machine too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.crc32 import crc32, seal, unseal
from gshard._util.durable import fsync, read_regular, write_file
from gshard.checkpoint.bounds import Bounds, bounds_of
from gshard.checkpoint.step_files import THREADS, run_parallel

SHARDS, INDEX = "shards", "shards.json"
_ALIGNMENT = 64  # bytes
_MOST = 2**30  # bytes of an index


class Key(NamedTuple):
    """Which part of which array it is."""

    path: str
    bounds: Bounds

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(max(0, end - start) for start, end in self.bounds)

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    def shared(self, other: Key) -> Key:
        """What both are parts of, of one array; perhaps without entries."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return Key(self.path, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs))

    def within(self, other: Key) -> tuple[slice, ...]:
        """Its place in another part that contains it."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return tuple(slice(a - c, b - c) for (a, b), (c, _) in pairs)


class Shard(NamedTuple):
    """A shard in the file of a step: the bytes from `offset` on, and their CRC-32."""

    folder: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    checksum: int

    def view(self) -> np.ndarray:
        """The shard in the file, unread."""
        return np.memmap(self.folder / SHARDS, self.dtype, "r", self.offset, self.shape)

    def is_undamaged(self) -> bool:
        """Reads the shard and compares its checksum."""
        return crc32(_bytes(self.view())) == self.checksum


class Index(NamedTuple):
    """What `shards.json` says: the shards of a process, and what it notes beside them."""

    noted: dict[str, Any]
    shards: dict[Key, Shard]


def keys_of(path: str, x: jax.Array | jax.ShapeDtypeStruct) -> dict[Any, Key]:
    """The shard of an array that each of this process's devices holds."""
    sharding: Any = x.sharding
    indices = sharding.addressable_devices_indices_map(x.shape)
    return {d: Key(path, bounds_of(index, x.shape)) for d, index in indices.items()}


def key_of(path: str, bounds: Sequence[Sequence[int]]) -> Key:
    """A key from JSON."""
    return Key(path, tuple((a, b) for a, b in bounds))


def own_shards(arrays: Mapping[str, jax.Array], left_out: set[Key]) -> dict[Key, jax.Array]:
    """Each shard of this process once, on a device, without those in `left_out`."""
    held: dict[Key, jax.Array] = {}
    for path, x in arrays.items():
        keys = keys_of(path, x)
        for part in x.addressable_shards:
            if (key := keys[part.device]) not in left_out and key not in held:
                held[key] = part.data
    return held


def copy_to_host(shards: Mapping[Key, jax.Array]) -> dict[Key, np.ndarray]:
    """The shards in the host's memory.

    Those that are there already are not copied. While somebody refers to one, JAX on a CPU copies
    it rather than donate it, so what comes after cannot change it; on a GPU a program that is to
    reuse its memory fails (`host_copy`).
    """
    for x in shards.values():
        x.copy_to_host_async()
    return {key: np.asarray(x) for key, x in shards.items()}


def write_shards(folder: Path, shards: Mapping[Key, np.ndarray], noted: Mapping[str, Any]) -> None:
    """Writes the shards of this process into an existing folder, the index last."""
    listed = []
    with (folder / SHARDS).open("wb") as file:
        for key, x in shards.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            listed.append([*key, str(x.dtype), file.tell(), crc32(_bytes(x))])
            file.write(_bytes(x))
        file.flush()
        os.fsync(file.fileno())
    write_file(folder / INDEX, seal(json.dumps({"noted": noted, "shards": listed}).encode()))
    fsync(folder)


def note(folder: Path, **noted: Any) -> None:
    """Changes some of what `shards.json` notes; an error as of `read_index`."""
    content = _content(folder)
    content["noted"] |= noted
    write_file(folder / INDEX, seal(json.dumps(content).encode()))


def _content(folder: Path) -> dict[str, Any]:
    return json.loads(unseal(read_regular(folder / INDEX, _MOST)))


def read_index(folder: Path) -> Index:
    """Reads `shards.json`; an `OSError` or a `ValueError` if it is not what was written."""
    content = _content(folder)
    size = (folder / SHARDS).stat().st_size
    found = {}
    for path, bounds, dtype, offset, checksum in content["shards"]:
        key = key_of(path, bounds)
        shard = Shard(folder, jnp.dtype(dtype), key.shape, offset, checksum)
        if offset + key.size * shard.dtype.itemsize > size:
            raise ValueError("the file of the shards was cut short")
        found[key] = shard
    return Index(content["noted"], found)


def damaged(shards: Mapping[Key, Shard]) -> set[Key]:
    """Those whose bytes are not what was written, or cannot be read."""

    def fine(shard: Shard) -> bool:
        try:
            return shard.is_undamaged()
        except (OSError, ValueError):  # the file is gone
            return False

    kept = run_parallel(fine, shards.values(), THREADS)
    return {key for key, is_fine in zip(shards, kept, strict=True) if not is_fine}


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data


def covered(needed: Key, keys: Iterable[Key]) -> bool:
    """Whether shards, of which none has an entry of another, have all of it together."""
    parts = (key.shared(needed) for key in keys if key.path == needed.path)
    return sum(part.size for part in parts) == needed.size
