"""Which bytes of a step a process needs: those of the blocks that its devices' shards overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.checkpoint.array_ranges import array_of, entries
from gshard.checkpoint.read_arrays import open_arrays
from gshard.checkpoint.store import Wanted

Box = tuple[range, ...]  # the indices of a block, or of a shard, in each dimension
Ranges = dict[str, list[tuple[int, int]]]  # by file: offset and number of bytes


def needed_ranges(folder: Path, wanted: Iterable[Wanted]) -> Ranges:
    """The bytes that reading these arrays reads, in each file of an array folder.

    The folder needs only the files that describe the arrays, not their values.
    """
    shards: dict[str, set[Box]] = {}
    for group in wanted:
        for array, x in group.items():
            shards.setdefault(array, set()).update(_shards(x))
    opened = open_arrays(folder, shards)
    shapes: dict[str, Sequence[int]] = {}
    ranges: Ranges = {}
    for key, file, offset, size in entries(folder):
        array = array_of(key, shards)
        if array is None:
            continue
        if array not in shapes:
            shapes[array] = _block_shape(opened[array].result())
        # The key ends with `c/0/1` for the block with the index (0, 1).
        index = map(int, key[len(array) :].split("/")[2:])
        block = [range(i * n, (i + 1) * n) for i, n in zip(index, shapes[array], strict=True)]
        if any(all(map(_overlap, block, shard)) for shard in shards[array]):
            ranges.setdefault(file, []).append((offset, size))
    return ranges


def _shards(x: jax.ShapeDtypeStruct) -> set[Box]:
    """The indices of this process's shards."""
    sharding: Any = x.sharding  # which all wanted arrays have
    indices = sharding.addressable_devices_indices_map(x.shape).values()
    return {
        tuple(range(*s.indices(n)) for s, n in zip(index, x.shape, strict=True))
        for index in indices
        if index is not None
    }


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _block_shape(opened: Any) -> Sequence[int]:
    return [size or 1 for size in opened.chunk_layout.read_chunk.shape or ()]
