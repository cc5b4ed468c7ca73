"""Tensors of a safetensors file, read by parts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from gshard._util.errors import GShardError
from gshard.checkpoint.safetensors.format import DTYPES, places


class Stored(NamedTuple):
    """One tensor in a file.

    Attributes:
      path: of the file.
      dtype: in the format's words, such as `"F32"`.
      shape: of the whole tensor.
      offset: the byte of the file that it begins at.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part as an array of its own; no more of the file than that is read.

        By a map of the file and not by the library, which has no NumPy arrays of float8.
        """
        dtype = DTYPES[self.dtype]
        size = [len(range(*s.indices(n))) for s, n in zip(index, self.shape, strict=True)]
        if 0 in size:
            return np.zeros(size, dtype)
        whole = np.memmap(self.path, dtype, "r", self.offset, self.shape)
        return np.array(whole[index])


def tensors_of(file: Path, call: str) -> dict[str, Stored]:
    """The tensors of a file by name, after the safetensors library has found it to be good.

    Raises:
      GShardError: the library is not installed, there is no file, or it is damaged.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise GShardError(
            f"{call} reads with the safetensors library, which is not installed: "
            "pip install 'gshard[export]'."
        ) from error
    if not file.is_file():
        what = "is not a file" if file.exists() else "does not exist"
        raise GShardError(f"{call}: {file} {what}. Pass the path of a safetensors file.")
    try:
        with safe_open(file, framework="numpy"):
            return {name: Stored(file, *place) for name, place in places(file).items()}
    except (SafetensorError, OSError) as error:
        raise GShardError(
            f"{call}: {file} is not a safetensors file, or it was cut short or damaged: "
            f"{error}. Write or copy it anew."
        ) from error
