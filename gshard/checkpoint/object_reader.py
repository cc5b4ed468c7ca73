"""`ObjectReader`: reads arrays of a step in an object store.

Orbax reads files, so a process copies what it needs into a folder of its machine: the files that
describe the arrays, and of those with their values the blocks that its shards overlap, each at its
place. What is between them is never read. A block is compared with its checksum when it arrives.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import jax

from gshard._util.errors import GShardError
from gshard._util.scratch import scratch_folder
from gshard.checkpoint.bucket import REQUESTS
from gshard.checkpoint.checksums import (
    DIFFERS,
    Damage,
    DamagedFileError,
    check_description,
    read_combined_manifest,
    read_manifest,
)
from gshard.checkpoint.data_state import data_state_name
from gshard.checkpoint.manifest import PROCESS_MANIFESTS, Listed, Segment, is_in, process_manifest
from gshard.checkpoint.needed_ranges import needed_ranges
from gshard.checkpoint.orbax import ARRAYS
from gshard.checkpoint.read_arrays import read_arrays
from gshard.checkpoint.step_files import THREADS, StepFiles, checksum_of, run_parallel
from gshard.checkpoint.step_info import DATA, StepInfo
from gshard.checkpoint.store import Wanted, Wants

_OF_PROCESS = re.compile(rf"{ARRAYS}/ocdbt\.process_(\d+)/.*")
_REQUEST = 2**23  # bytes of a request at most; fewer take about as long, more need memory


class RangeFiles(StepFiles, Protocol):
    """The files of a step, of which parts can be read."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Some bytes of a file; fewer if it ends before."""
        ...


class Part(NamedTuple):
    """Some bytes of a file; their CRC-32 and the path of their array, if known."""

    start: int
    size: int
    checksum: int | None = None
    array: str | None = None


class ObjectReader:
    """Reads arrays of steps; what it has copied goes when its context ends."""

    def __init__(self, step: Callable[[int], RangeFiles], verify: bool):
        self._step, self._verify = step, verify
        self._copies: dict[int, _Copy] = {}

    def damages(self, step: int, wants: Wants) -> list[Damage]:
        """Copies what this process needs of a step, and returns what of it is damaged."""
        if not self._verify:
            return []
        copy = self._copy(step)
        try:
            listed = read_combined_manifest(copy.files)
            found = copy.copy_descriptions(listed) or check_description(copy.files)
            if not found:
                found = copy.copy_arrays(wants(StepInfo.read(copy.files)), listed)
                own = {data_state_name(x) for x in (0, jax.process_index())} & {*listed}
                found += copy.copy({name: parts_of(listed[name] or ()) for name in own})
        except DamagedFileError as error:
            return [error.args[0]]
        return found

    def files(self, step: int) -> RangeFiles:
        """The files of the step."""
        return self._step(step)

    def read(self, step: int, wanted: Wanted) -> dict[str, jax.Array]:
        """Arrays by path."""
        return read_arrays(self.fetch(step, wanted) / ARRAYS, wanted)

    def fetch(self, step: int, wanted: Wanted) -> Path:
        """A folder with what of the step is needed to read these arrays."""
        copy = self._copy(step)
        if not self._verify:
            found = copy.copy_descriptions(None) or copy.copy_arrays([wanted], None)
            if found:
                raise GShardError(f"{copy.files}/{found[0]}.")
        return copy.folder / str(step)

    def _copy(self, step: int) -> _Copy:
        if step not in self._copies:
            self._copies[step] = _Copy(self._step(step))
        return self._copies[step]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self._copies.values():
            shutil.rmtree(copy.folder, ignore_errors=True)
        self._copies.clear()


class _Copy:
    """What a process needs of a step, in a folder of its machine."""

    def __init__(self, files: RangeFiles):
        self.files, self.folder = files, scratch_folder("restore")
        self._there: set[tuple[str, int]] = set()  # what was copied: a file, and an offset in it
        self._manifests: dict[str, Listed] = {}

    def copy_descriptions(self, listed: Listed | None) -> list[Damage]:
        """Copies the files that describe the arrays; `listed` has their checksums."""
        names = self.files.names() if listed is None else {x for x in listed if listed[x]}
        parts = {}
        for name in sorted(names):
            if is_in(PROCESS_MANIFESTS, name) or is_in(DATA, name) or _OF_PROCESS.fullmatch(name):
                continue
            if listed is None:
                parts[name] = [Part(0, self.files.size(name))]
            else:
                parts[name] = parts_of(listed[name] or ())
        return self.copy(parts)

    def copy_arrays(self, wanted: Iterable[Wanted], listed: Listed | None) -> list[Damage]:
        """Copies what is needed to read these arrays."""
        parts = {}
        for file, ranges in needed_ranges(self.folder / self.files.name / ARRAYS, wanted).items():
            name = f"{ARRAYS}/{file}"
            if listed is None:
                parts[name] = [Part(start, size) for start, size in ranges]
            else:
                parts[name] = [
                    part
                    for part in parts_of(self._segments(name, listed))
                    if any(part.start < s + n and s < part.start + part.size for s, n in ranges)
                ]
        return self.copy(parts)

    def _segments(self, name: str, listed: Listed) -> Iterable[Segment]:
        """The segments of a file, from the manifest of the process that wrote it."""
        process = _OF_PROCESS.fullmatch(name)
        if listed.get(name) is not None or process is None:
            return listed.get(name) or ()
        manifest = process_manifest(int(process[1]))
        if manifest not in self._manifests:
            self._manifests[manifest] = read_manifest(self.files, manifest, listed.get(manifest))
        return self._manifests[manifest].get(name) or ()

    def copy(self, parts: Mapping[str, Iterable[Part]]) -> list[Damage]:
        """Copies parts of files that are not there yet."""
        new = {
            name: [part for part in several if (name, part.start) not in self._there]
            for name, several in parts.items()
        }
        self._there |= {(name, part.start) for name, several in new.items() for part in several}
        return copy_parts(self.files, new, self.folder / self.files.name)


def parts_of(segments: Iterable[Segment]) -> list[Part]:
    """The segments of a file, each with its place."""
    listed = list(segments)
    starts = accumulate((size for size, _, _ in listed), initial=0)
    return [Part(start, *segment) for start, segment in zip(starts, listed, strict=False)]


def copy_parts(
    files: RangeFiles, parts: Mapping[str, Sequence[Part]], folder: Path
) -> list[Damage]:
    """Writes parts of files to their places in files of the same names below `folder`."""
    for name in parts:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(0o600)

    def fetch(request: tuple[str, int, int]) -> tuple[str, str] | None:
        name, start, end = request
        try:
            content = files.read_range(name, start, end)
        except FileNotFoundError:
            return name, "is missing"
        with (folder / name).open("r+b", buffering=0) as file:
            if os.pwrite(file.fileno(), content, start) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        return None if len(content) == end - start else (name, DIFFERS)

    def check(item: tuple[str, Part]) -> bool:
        name, part = item
        with (folder / name).open("rb") as file:
            own = file.fileno()
            found = checksum_of(lambda start, n: os.pread(own, n, start), part.start, part.size)
        return found == part.checksum

    requests = [(name, *ends) for name, several in parts.items() for ends in _requests(several)]
    bad = dict(x for x in run_parallel(fetch, requests, REQUESTS) if x is not None)
    every = [(name, part) for name, several in parts.items() for part in several]
    known = [(name, part) for name, part in every if part.checksum is not None]
    harmed: dict[str, list[str]] = {name: [] for name in bad}
    for (name, part), is_right in zip(known, run_parallel(check, known, THREADS), strict=True):
        if not is_right:
            bad.setdefault(name, DIFFERS)
            arrays = harmed.setdefault(name, [])
            if part.array and part.array not in arrays:
                arrays.append(part.array)
    return [Damage(name, what, tuple(harmed[name])) for name, what in bad.items()]


def _requests(parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """The ends of each request: adjacent parts are joined, and long ones split."""
    joined: list[list[int]] = []
    for start, size in sorted(part[:2] for part in parts):
        if joined and joined[-1][1] == start:
            joined[-1][1] += size
        else:
            joined.append([start, start + size])
    for start, end in joined:
        for at in range(start, max(end, start + 1), _REQUEST):
            yield at, min(at + _REQUEST, end)
