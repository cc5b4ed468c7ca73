"""The safetensors format: which dtypes it has, what stands before the numbers, where these lie.

A file is the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces
to 8 bytes), and the numbers (little-endian, row-major, without gaps).
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError

# In the order in which the library lays tensors out: the larger alignment first.
DTYPES: dict[str, np.dtype] = {
    name: jnp.dtype(dtype)
    for name, dtype in {
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
        "F32": np.float32,
        "U32": np.uint32,
        "I32": np.int32,
        "BF16": jnp.bfloat16,
        "F16": np.float16,
        "U16": np.uint16,
        "I16": np.int16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
METADATA = "__metadata__"  # a name that no tensor can have
_LENGTH = struct.Struct("<Q")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(DTYPES.values())}


class Tensor(NamedTuple):
    """What the header says of one tensor, but for its place."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class Place(NamedTuple):
    """One tensor in a file: the name of its dtype, its shape, the byte of the file it begins at."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def refuse_strange(tensors: Iterable[Tensor], call: str) -> None:
    """Raises a `GShardError` that names the tensors whose dtype the format does not have."""
    strange = [f"{x.name} ({x.dtype})" for x in tensors if x.dtype not in _NAMES]
    if strange:
        raise GShardError(
            f"{call}: the safetensors format does not have the dtype of {', '.join(strange)}. It "
            f"has {', '.join(str(dtype) for dtype in _NAMES)}: keep these values in one of them "
            "(a complex number as two floats)."
        )


def in_file_order(tensor: Tensor) -> tuple[int, str]:
    """A key for `sorted`: large alignment first, then by name, as the library has them."""
    return _ORDER[tensor.dtype], tensor.name


def header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file in which `tensors` follow one another, up to the first number.

    Raises:
      GShardError: a name or a text cannot be written as UTF-8.
    """
    said: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        said[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    try:
        text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise GShardError(
            f"a name or a text of metadata= cannot be written as UTF-8: {error}. Use another one."
        ) from error
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def places(path: Path) -> dict[str, Place]:
    """Where the tensors of a file lie that the library has found to be good, by name."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        said = json.loads(file.read(length))
    said.pop(METADATA, None)
    start = _LENGTH.size + length
    return {
        name: Place(x["dtype"], tuple(x["shape"]), start + x["data_offsets"][0])
        for name, x in said.items()
    }
