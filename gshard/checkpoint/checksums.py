"""Manifests: checksums of every byte of a step, and what a damaged byte belongs to.

Every process lists its own files in `manifests/process_K.json`; the first lists all others and the
manifests themselves in `manifest.json`, written last. A file is a row of segments, each the value
of one leaf or what lies between, with its CRC-32: so whatever differs is found, and named.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from gshard._util.errors import some
from gshard.checkpoint.directory import MANIFEST, fsync, write_durably

PARTS = "manifests"
_BLOCK = 2**22  # bytes that are read at once

Range = tuple[int, int, str]
"""Offset and bytes of a value in its file, and the path of the leaf that it belongs to."""
Segment = tuple[int, int, str | None]
"""Bytes, their CRC-32, and the path of a leaf."""
Report = Callable[[int], object]
"""Called with the bytes of every block that was read."""


@dataclass(frozen=True)
class Damage:
    """One file that is not as it was written.

    Attributes:
      file: its path within the step.
      what: what is wrong with it.
      leaves: paths of the arrays whose values it harms; empty where none can be told.
    """

    file: str
    what: str
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        harmed = f", of {some(self.leaves)}" if self.leaves else ""
        return f"{self.file} {self.what}{harmed}"


def part_name(process: int) -> str:
    """The manifest of one process, within a step."""
    return f"{PARTS}/process_{process}.json"


def write_part(
    step: Path, process: int, files: Iterable[str], ranges: Mapping[str, Sequence[Range]]
) -> None:
    """Lists the files of one process, and brings them onto the disk.

    Args:
      step: folder of the step.
      process: its rank.
      files: their paths within the step.
      ranges: by file, where the values lie.
    """
    listed = {name: _segments(step / name, ranges.get(name, ())) for name in sorted(files)}
    for name in listed:
        fsync(step / name)
    target = step / part_name(process)
    new = target.with_suffix(".new")
    write_durably(new, _sealed(listed))
    new.rename(target)  # who waits for it finds it complete


def write_whole(step: Path, processes: int) -> None:
    """Lists what no process has listed, and the manifests of all; then the step is complete."""
    known: set[str] = set()
    for rank in range(processes):
        known |= _unsealed((step / part_name(rank)).read_bytes()).keys()
    rest = sorted(_files(step) - known)
    for name in rest:
        fsync(step / name)
    write_durably(step / MANIFEST, _sealed({name: _segments(step / name, ()) for name in rest}))
    for folder, _, _ in os.walk(step):
        fsync(Path(folder))


def write_all(folder: Path) -> None:
    """Lists all files of a folder, of however many processes."""
    (folder / PARTS).mkdir()
    write_part(folder, 0, _files(folder), {})
    write_whole(folder, 1)


def damages(
    step: Path, share: tuple[int, int] = (0, 1), report: Report = lambda count: None
) -> list[Damage]:
    """What is not as it was written.

    Args:
      step: folder of the step.
      share: with several processes, which of how many shares of the files to read. What concerns
        the step as a whole is in every share.
      report: for a display of the progress.
    """
    try:
        listed = _read(step, MANIFEST, None)
        parts = [name for name in listed if PurePosixPath(name).parent.as_posix() == PARTS]
        if not parts:  # another manifest in its place
            return [Damage(MANIFEST, "differs from what was written")]
        for name in parts:
            listed |= _read(step, name, listed[name])
        present = _files(step) - {MANIFEST}
    except _DamagedError as error:
        return [error.damage]
    found = [
        Damage(name, "is missing", _leaves(listed[name]))
        for name in sorted(listed.keys() - present)
    ]
    found += [Damage(name, "is not of this step") for name in sorted(present - listed.keys())]
    number, count = share
    for name in sorted(present & listed.keys())[number::count]:
        found += _compared(step, name, listed[name], report)
    return found


def size_of(step: Path) -> int:
    """Bytes of all files of a step."""
    found = [path.lstat() for path in step.rglob("*")]
    return sum(x.st_size for x in found if stat.S_ISREG(x.st_mode))


class _DamagedError(Exception):
    def __init__(self, damage: Damage):
        self.damage = damage


def _read(step: Path, name: str, segments: Sequence[Segment] | None) -> dict[str, list[Segment]]:
    """What a manifest lists, after it is compared with what another manifest says of it."""
    if segments is not None and (found := _compared(step, name, segments, lambda count: None)):
        raise _DamagedError(found[0])
    path = step / name
    try:
        if not _is_regular(path) and os.path.lexists(path):
            raise _DamagedError(Damage(name, "is no regular file"))
        return _unsealed(path.read_bytes())
    except FileNotFoundError:
        raise _DamagedError(Damage(name, "is missing")) from None
    except OSError as error:
        raise _DamagedError(Damage(name, f"cannot be read ({error.strerror})")) from error
    except (ValueError, TypeError, KeyError):
        raise _DamagedError(Damage(name, "differs from what was written")) from None


def _is_regular(path: Path) -> bool:
    """Whether its bytes lie there: not elsewhere, nor in a pipe, which a reader would wait for."""
    return path.is_file() and not path.is_symlink()


def _sealed(listed: Mapping[str, Sequence[Segment]]) -> bytes:
    """A manifest: one line of JSON, and one with the CRC-32 of it."""
    line = json.dumps(listed, separators=(",", ":"), sort_keys=True).encode() + b"\n"
    return line + b"%08x\n" % zlib.crc32(line)


def _unsealed(data: bytes) -> dict[str, list[Segment]]:
    line, end, seal = data[:-9], data[-10:-9], data[-9:]
    if end != b"\n" or seal != b"%08x\n" % zlib.crc32(line):
        raise ValueError("the seal is broken")
    listed = json.loads(line)
    for name in listed:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name:
            raise ValueError("a name that leaves the step")
    return {name: [tuple(x) for x in segments] for name, segments in listed.items()}


def _files(step: Path) -> set[str]:
    """Everything in a step that is no folder, by its path within."""

    def refuse(error: OSError) -> None:
        name = Path(str(error.filename)).relative_to(step).as_posix()
        raise _DamagedError(Damage(name, f"cannot be read ({error.strerror})"))

    found: set[str] = set()
    for folder, folders, names in os.walk(step, onerror=refuse):
        inside = Path(folder)
        links = [name for name in folders if (inside / name).is_symlink()]
        found |= {(inside / name).relative_to(step).as_posix() for name in [*names, *links]}
    return found


def _segments(path: Path, ranges: Sequence[Range]) -> list[Segment]:
    """The segments of a file; together they hold every byte."""
    found: list[Segment] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = 0
        for offset, length, leaf in sorted(ranges):
            if offset < at or offset + length > size:
                continue  # two keys with one value
            if offset > at:
                found.append((offset - at, _checksum(file, offset - at), None))
            found.append((length, _checksum(file, length), leaf))
            at = offset + length
        if at < size or not found:
            found.append((size - at, _checksum(file, size - at), None))
    return found


def _checksum(file: BinaryIO, length: int, report: Report = lambda count: None) -> int:
    """CRC-32 of the next bytes of a file."""
    total = 0
    while length > 0:
        block = file.read(min(length, _BLOCK))
        if not block:
            return -1
        total = zlib.crc32(block, total)
        length -= len(block)
        report(len(block))
    return total


def _compared(step: Path, name: str, segments: Sequence[Segment], report: Report) -> list[Damage]:
    path = step / name
    if not os.path.lexists(path):
        return [Damage(name, "is missing", _leaves(segments))]
    if not _is_regular(path):
        return [Damage(name, "is no regular file")]
    expected = sum(length for length, _, _ in segments)
    try:
        if (size := path.stat().st_size) != expected:
            what = f"has {size:,} bytes instead of {expected:,}"
            return [Damage(name, what, _leaves(segments))]
        with path.open("rb") as file:
            bad = [x for x in segments if _checksum(file, x[0], report) != x[1]]
    except OSError as error:
        return [Damage(name, f"cannot be read ({error.strerror})", _leaves(segments))]
    return [Damage(name, "differs from what was written", _leaves(bad))] if bad else []


def _leaves(segments: Iterable[Segment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(leaf for _, _, leaf in segments if leaf is not None))
