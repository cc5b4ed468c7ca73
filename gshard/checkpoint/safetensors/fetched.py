"""`Fetched`: a tensor in an object store, of which a process reads what its devices need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gshard.checkpoint.bucket import REQUESTS
from gshard.checkpoint.safetensors.format import DTYPES, Stored
from gshard.checkpoint.step_files import run_parallel

_PAGE = 2**12  # bytes that are there or not
_GAP = 2**20  # fewer bytes between two ranges than take as long as another request
_MOST = 2**22  # bytes of one request


class Fetched:
    """Memory for a tensor, that is filled where it is needed, once; the system gives no more.

    Views of `array` tell what is needed, as those of a file that is mapped into memory do.
    """

    def __init__(self, stored: Stored):
        self._stored = stored
        self.array = np.empty(stored.shape, DTYPES[stored.dtype])
        self._bytes = self.array.reshape(-1).view(np.uint8)
        self._there = np.zeros(-(-self.array.nbytes // _PAGE), bool)

    def fill(self, view: np.ndarray) -> np.ndarray:
        """Reads the numbers of a view of `array`, and returns it."""
        needed, first = np.zeros_like(self._there), byte_bounds(self.array)[0]
        last = -_GAP
        for low, high in _ranges(view):
            start = last if low - last < _GAP else low
            needed[(start - first) // _PAGE : -(-(high - first) // _PAGE)] = True
            last = high
        edges = np.flatnonzero(np.diff(needed & ~self._there, prepend=False, append=False)) * _PAGE
        requests = [
            (start, min(start + _MOST, end, self.array.nbytes))
            for begin, end in edges.reshape(-1, 2).tolist()
            for start in range(begin, end, _MOST)
        ]
        run_parallel(self._read, requests, REQUESTS)
        self._there |= needed
        return view

    def _read(self, request: tuple[int, int]) -> None:
        start, end = request
        self._bytes[start:end] = np.frombuffer(self._stored.read(start, end), np.uint8)


def _ranges(view: np.ndarray) -> Iterator[tuple[int, int]]:
    """The addresses between which the numbers of a view are, ascending."""
    if view.size == 0:
        return
    low, high = byte_bounds(view)
    if high - low <= max(view.nbytes, _GAP):
        yield low, high
        return
    axis = max(range(view.ndim), key=lambda i: view.strides[i] * (view.shape[i] - 1))
    for half in np.array_split(view, 2, axis):
        yield from _ranges(half)
