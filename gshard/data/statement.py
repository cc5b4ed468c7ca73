"""What a process says of the rows that it gives: their arrays in words, numbers for their data."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten

HASHED = 1 << 20
"""Bytes of each array, of every row some, that tell whether two processes give the same data."""


class Statement(NamedTuple):
    """What one process gives."""

    can: bool  # whether it can place it
    kind: int  # of `text`
    data: int  # of some bytes of every row
    says: bool  # whether these are data: not all the same entry, as before any was read
    rows: int
    text: str  # its arrays, one a line; or why it cannot

    def __str__(self) -> str:
        return f"{self.can:d} {self.kind} {self.data} {self.says:d} {self.rows}\n{self.text}"

    @classmethod
    def read(cls, said: str) -> Statement:
        """Of `str(statement)`, the text perhaps cut."""
        head, _, text = said.partition("\n")
        can, kind, data, says, rows = map(int, head.split())
        return cls(bool(can), kind, data, bool(says), rows, text)


def statement(batch: Any, fault: GShardError | None) -> Statement:
    """What this process says of its batch, or of what is wrong with it."""
    paths, leaves, structure = flatten(batch)
    rows = rows_of([getattr(x, "shape", ()) for x in leaves])
    if fault is not None:
        return Statement(False, 0, 0, False, rows, str(fault))
    words = []
    for path, x in zip(paths, leaves, strict=True):
        shape = getattr(x, "shape", ())
        own = ["rows" if n == rows else str(n) for n in shape[:1]] + [str(n) for n in shape[1:]]
        value = "" if shape else f" = {x}"
        dtype = getattr(x, "dtype", type(x).__name__)
        words.append(f"{path or 'batch'} {dtype}[{', '.join(own)}]{value}")
    text = "\n".join([*words, structure_words(structure)])
    return Statement(True, zlib.crc32(text.encode()), *_data(leaves), rows, text)


def structure_words(structure: Any) -> str:
    """A tree without its leaves, in words that are the same in every process."""
    return "tree " + re.sub(r" at 0x[0-9a-f]+", "", str(structure)).removeprefix("PyTreeDef")


def rows_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Rows of the first array that has some; 0 when there are only scalars."""
    return next((shape[0] for shape in shapes if shape), 0)


def _data(leaves: Sequence[Any]) -> tuple[int, bool]:
    """A number that tells this process's rows from another's, and whether they say anything.

    Scalars are the same everywhere, and arrays whose entries are all equal are no data yet.
    """
    found, says = 0, False
    for x in leaves:
        if not np.ndim(x) or not np.size(x):
            continue
        x = np.asarray(x)
        entries = x.reshape(x.shape[0], -1)
        # Of every row, and not the first rows alone: these may be a header or a padding.
        every = -(-entries.nbytes // HASHED)
        some = np.ascontiguousarray(entries[:, ::every]).reshape(-1)
        as_bytes = some.view(np.uint8).reshape(some.size, -1)  # so that NaN is equal to itself
        says |= bool((as_bytes != as_bytes[:1]).any())
        found = zlib.crc32(as_bytes.tobytes(), found)
    return found, says
