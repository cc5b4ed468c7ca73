"""Manifests: every file of a step, and the CRC-32 of each of its segments.

Every process lists the files that it wrote in `manifests/process_K.json`. The first process lists
all other files and these manifests in `manifest.json`, the combined manifest, which is written last
and names the files that they list. So a process that verifies its share of a step reads the
combined manifest and its share of the others, however many processes wrote it. A file is a sequence
of segments, each with its CRC-32: at most 64 MiB of the bytes of one array, or of those between two
arrays. So every difference is found, and its array can be named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gshard._util.crc32 import seal, unseal
from gshard._util.durable import fsync, write_file
from gshard.checkpoint.step_files import StepFolder
from gshard.checkpoint.step_info import DATA, MANIFEST

PROCESS_MANIFESTS = "manifests"
_LARGEST_SEGMENT = 2**26  # bytes of a segment: threads share the file of a large array

Range = tuple[int, int, str]  # offset and number of bytes in a file, and the path of their array
Segment = tuple[int, int, str | None]  # number of bytes, their CRC-32, and the path of their array
Listed = dict[str, list[Segment] | None]  # by file; None where another manifest has its segments


def process_manifest(process: int) -> str:
    """The manifest of one process, within a step."""
    return f"{PROCESS_MANIFESTS}/process_{process}.json"


def write_process_manifest(
    step: Path, process: int, files: Iterable[str], ranges: Mapping[str, Sequence[Range]]
) -> None:
    """Lists the files of one process, with the bytes of each array in them, and syncs them."""
    listed = {name: _segments(step, name, ranges.get(name, ())) for name in sorted(files)}
    for name in listed:
        fsync(step / name)
    write_file(step / process_manifest(process), sealed(listed))


def write_combined_manifest(step: Path, processes: int) -> None:
    """Lists the files that no process listed, and all manifests: then the step is complete."""
    known: Listed = {}
    for rank in range(processes):
        listed = unsealed((step / process_manifest(rank)).read_bytes())
        known |= {name: listed[name] if is_in(DATA, name) else None for name in listed}
    rest = sorted(StepFolder(step).names() - known.keys())
    for name in rest:
        fsync(step / name)
    write_file(step / MANIFEST, sealed(known | {x: _segments(step, x, ()) for x in rest}))
    for folder, _, _ in os.walk(step):
        fsync(Path(folder))


def write_manifests(folder: Path) -> None:
    """Lists all files of a folder that one process wrote."""
    (folder / PROCESS_MANIFESTS).mkdir()
    write_process_manifest(folder, 0, StepFolder(folder).names(), {})
    write_combined_manifest(folder, 1)


def sealed(listed: Mapping[str, Sequence[Segment] | None]) -> bytes:
    """A manifest: one line of JSON, and one with its CRC-32."""
    return seal(json.dumps(listed, separators=(",", ":"), sort_keys=True).encode())


def unsealed(data: bytes) -> Listed:
    """The files that a manifest lists; a `ValueError` or the like if it is damaged."""
    listed = json.loads(unseal(data))
    for name in listed:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name:
            raise ValueError("a name that leaves the step")
    return {x: s and [_segment(*segment) for segment in s] for x, s in listed.items()}


def _segment(length: Any, checksum: Any, array: Any) -> Segment:
    """A segment as a manifest has it; a `TypeError` or `ValueError` for another form."""
    if type(length) is not int or type(checksum) is not int or not isinstance(array, str | None):
        raise TypeError("no segment")
    if length < 0:
        raise ValueError("a negative length")
    return length, checksum, array


def _segments(step: Path, name: str, ranges: Sequence[Range]) -> list[Segment]:
    """The segments of a file; together they hold every byte."""
    size, at, parts = (step / name).stat().st_size, 0, list[tuple[int, str | None]]()
    for offset, length, array in sorted(ranges):
        if at <= offset <= size - length:  # else two keys with one value
            parts += [(offset - at, None), (length, array)]
            at = offset + length
    parts.append((size - at, None))
    cut = [
        (min(_LARGEST_SEGMENT, n - i), array)
        for n, array in parts
        for i in range(0, n, _LARGEST_SEGMENT)
    ]
    found = StepFolder(step).checksums(name, [length for length, _ in cut])
    if -1 in found:
        raise OSError(f"{step / name} became shorter while it was read")
    return [(n, total, array) for (n, array), total in zip(cut, found, strict=True)]


def is_in(folder: str, name: str) -> bool:
    """Whether a file is in this folder of a step, and in none below it."""
    return PurePosixPath(name).parent.as_posix() == folder
