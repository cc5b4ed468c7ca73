"""What a safetensors file contains: tensors, their names, and their bytes.

A file is the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces
to 8 bytes), and the numbers (little-endian, row-major, without gaps).
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint.casts import too_large
from gshard.checkpoint.safetensors.place import Place, read_range, size_of, version_of

# In the order in which the library writes tensors: the larger alignment first.
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
BLOCK = 2**23  # bytes that are copied at a time if an array is not contiguous
CONVERT = (
    "Convert it once, in PyTorch: safetensors.torch.save_file(torch.load(path, weights_only=True), "
    "'model.safetensors')."
)
_PICKLE = (b"PK\x03\x04", b"\x80\x02")  # in a zip file, or by itself
_LENGTH = struct.Struct("<Q")
_HEADER = 100_000_000  # bytes at most, as in the library
_FIRST = 2**17  # bytes that are read first; most headers are shorter
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """One tensor in a file."""

    path: Place  # of the file
    dtype: str  # the format's name, such as "F32"
    shape: tuple[int, ...]  # the full shape
    offset: int  # the byte of the file at which the tensor begins
    nbytes: int
    version: object  # of the file, when its header was read

    def view(self) -> np.ndarray:
        """The tensor in a file of a file system, unread."""
        dtype = DTYPES[self.dtype]
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        try:
            return np.memmap(str(self.path), dtype, "r", self.offset, self.shape)
        except ValueError as error:
            raise self._cut() from error

    def read(self, start: int, end: int) -> bytes:
        """Some bytes of the tensor."""
        found = read_range(self.path, self.offset + start, self.offset + end)
        if len(found) < end - start:
            raise self._cut()
        return found

    def _cut(self) -> GShardError:
        return GShardError(f"{self.path} was cut short while it was read. Write it again.")


def check_writable(dtypes: Mapping[str, np.dtype], call: str) -> None:
    """Refuses dtypes without a name in the format, and a name that means something else in it."""
    if METADATA in dtypes:
        raise GShardError(
            f"{call}: the name {METADATA!r} is reserved in safetensors files. Rename it."
        )
    unknown = [f"{name} ({x})" for name, x in dtypes.items() if x not in _NAMES]
    if unknown:
        raise GShardError(
            f"{call}: the safetensors format does not have the dtype of {', '.join(unknown)}. It "
            f"has {', '.join(str(dtype) for dtype in _NAMES)}: keep these values in one of them "
            "(a complex number as two floats)."
        )


def alignment(dtype: np.dtype) -> int:
    """The place of a dtype in the order in which the library writes tensors."""
    return list(_NAMES).index(dtype)


def header(tensors: Iterable[Any], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its first tensor; each has `name`, `shape` and `dtype`."""
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + nbytes(tensor)
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise GShardError(
            f"a name or a string of metadata= cannot be written as UTF-8: {error}. Use another one."
        ) from error
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def nbytes(tensor: Any) -> int:
    """The bytes of a tensor in a file."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def tensors_of(file: Place, call: str) -> dict[str, Stored]:
    """The tensors of a file by name, after checking its header as the safetensors library does."""
    if not file.is_file():
        what = "is not a file" if isinstance(file, Path) and file.exists() else "does not exist"
        raise GShardError(f"{call}: {file} {what}. Pass the path of a safetensors file.")
    try:
        return _tensors(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        could_be_read = not isinstance(error, OSError)
        if could_be_read and read_range(file, 0, min(4, size_of(file))).startswith(_PICKLE):
            raise GShardError(f"{call}: {file} is a pickle of PyTorch. {CONVERT}") from error
        raise GShardError(
            f"{call}: {file} is not a safetensors file, or it was cut short or damaged: "
            f"{error}. Write or copy it again."
        ) from error


def _tensors(file: Place) -> dict[str, Stored]:
    """The tensors by a header; a `ValueError`, or the like, unless they fill the file."""
    size, version = size_of(file), version_of(file)
    first = read_range(file, 0, min(_FIRST, size))
    length = int.from_bytes(first[: _LENGTH.size], "little")
    start = _LENGTH.size + length
    if len(first) < _LENGTH.size or start > size or length > _HEADER:
        raise ValueError(f"it has {size:,} bytes, and would have a header of {length:,}")
    first += read_range(file, len(first), start)
    entries = json.loads(first[_LENGTH.size : start])
    entries.pop(METADATA, None)
    found, end = dict[str, Stored](), 0
    for (begin, after), name in sorted((x["data_offsets"], name) for name, x in entries.items()):
        dtype, shape = entries[name]["dtype"], entries[name]["shape"]
        known = DTYPES.get(dtype)  # newer libraries have more
        fits = known is None or math.prod(shape) * known.itemsize == after - begin
        whole = all(type(n) is int and n >= 0 for n in (begin, after - begin, *shape))
        if begin != end or not fits or not whole:
            where = f"at bytes {begin} to {after}, behind {end} bytes of others"
            raise ValueError(f"{name} is {dtype}{shape} {where}")
        found[name] = Stored(file, dtype, tuple(shape), start + begin, after - begin, version)
        end = after
    if start + end != size:
        raise ValueError(f"it has {size:,} bytes, and its tensors end at {start + end:,}")
    return {name: found[name] for name in entries}  # in the order of the header


def refuse_replaced(tensors: Iterable[Stored], call: str) -> None:
    """Refuses tensors of files that were written again or replaced since they were looked at."""
    versions = {tensor.path: tensor.version for tensor in tensors}
    if changed := [str(file) for file, old in versions.items() if version_of(file) != old]:
        raise GShardError(
            f"{call}: {some(changed)} changed during the load, so old and new weights may be "
            "mixed. The state is as it was: call again once nothing writes there."
        )


def row_major(x: np.ndarray, dtype: np.dtype) -> Iterator[memoryview]:
    """The bytes of an array in this dtype, row-major; at most one block is copied at a time."""
    if x.dtype == dtype and x.flags.c_contiguous:
        yield x.reshape(-1).view(np.uint8).data
        return
    x = np.atleast_1d(x)
    each = x.nbytes // max(len(x), 1)
    if each > BLOCK:
        for row in x:
            yield from row_major(row, dtype)
        return
    rows = BLOCK // max(each, 1)
    for i in range(0, len(x), rows):
        yield from row_major(rounded(x[i : i + rows], dtype), dtype)


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in this dtype, row-major; a warning names a number that it cannot hold."""
    with np.errstate(over="ignore"):
        new = x.astype(dtype, "C", copy=False)
    if lost := too_large(x, new):
        warn(
            f"save_safetensors writes an infinite value, or NaN, for one that {dtype} cannot "
            f"hold, {lost:g}. Pass dtype='float32', or 'bfloat16', which has nearly its range."
        )
    return new
