"""Checksums of every byte of a step, what a damaged byte belongs to, and which steps are undamaged.

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
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from gshard._util.crc32 import crc32
from gshard._util.durable import fsync, read_regular, write_file
from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint.directory import (
    DATA,
    DESCRIPTION,
    MANIFEST,
    DamagedInfoError,
    StepInfo,
    steps_in,
)
from gshard.distributed.agree import all_gather_text

PROCESS_MANIFESTS = "manifests"
_LISTED_FOLDERS = (PROCESS_MANIFESTS, DATA, "array_metadatas")  # read by the names in them
_MOST = 2**28  # bytes of a manifest
_BLOCK = 2**22  # bytes that a thread reads at once
_LARGEST_SEGMENT = 2**26  # bytes of a segment: threads share the file of a large array
_THREADS = min(16, os.cpu_count() or 1)
_SHOWN = 5  # damages of a step that a message lists

Range = tuple[int, int, str]  # offset and number of bytes in a file, and the path of their array
Segment = tuple[int, int, str | None]  # number of bytes, their CRC-32, and the path of their array
Listed = dict[str, list[Segment] | None]  # by file; None where another manifest has its segments
Progress = Callable[[int], object]  # called with the number of bytes of every block that was read


def _ignore(count: int) -> None:
    pass


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that differs from what was written; `Checkpointer.verify` lists them.

    Attributes:
      file: the file's path within the step.
      what: what is wrong with it.
      arrays: paths of the arrays whose values are harmed; empty if that cannot be determined.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=0)
      >>> with gshard.Checkpointer("checkpoints") as checkpointer:
      ...     checkpointer.save(0, state)
      ...     checkpointer.wait()
      ...     _ = checkpointer.directory.joinpath("0", "gshard.json").write_text("{}")
      ...     [(damage.file, damage.what) for damage in checkpointer.verify(0)]
      [('gshard.json', 'has 2 bytes instead of ...')]
    """

    file: str
    what: str
    arrays: tuple[str, ...] = ()

    def __str__(self) -> str:
        harmed = f", of {some(self.arrays)}" if self.arrays else ""
        return f"{self.file} {self.what}{harmed}"


class DamagedCheckpointError(GShardError):
    """A step differs from what was written.

    Attributes:
      damages: the damages of each step.
    """

    def __init__(self, message: str, damages: Mapping[int, list[Damage]]):
        super().__init__(message)
        self.damages: dict[int, list[Damage]] = dict(damages)


def find_undamaged(directory: Path, asked: int | None, verify: bool) -> tuple[int, set[int]]:
    """The step to read, the same on every process, and the steps that were found damaged.

    With `asked=None` that is the newest undamaged step. If another job deletes a step during this
    call, the next one is tried. Without `verify` no file is compared with its checksums.
    """
    bad: dict[int, list[Damage]] = {}
    while True:
        steps = steps_everywhere(directory) if asked is None else [asked]
        left = [step for step in steps if step not in bad]
        if not left:
            break
        found = _damages_found_together(directory / str(left[-1])) if verify else []
        if not found:
            if bad:
                warn(f"{_list_damages(directory, bad)}\nStep {left[-1]} is restored instead.")
            return left[-1], set(bad)
        if left[-1] in steps_everywhere(directory):
            bad[left[-1]] = found
        elif asked is not None:
            raise GShardError(f"step {asked} was deleted from {directory} while it was read.")
    if not bad:
        why = "holds no checkpoint" if directory.is_dir() else "does not exist"
        theirs = some(x.parent.name for x in directory.glob("*/_CHECKPOINT_METADATA"))
        hint = f" Orbax itself wrote {theirs}: read it with gshard.import_orbax." if theirs else ""
        raise GShardError(f"restore: {directory} {why}.{hint}")
    fix = (
        "No step is undamaged; verify=False reads what can be read."
        if asked is None
        else "Without step= the newest step that is undamaged is restored."
    )
    raise DamagedCheckpointError(f"{_list_damages(directory, bad)}\n{fix}", bad)


def steps_everywhere(directory: Path) -> list[int]:
    """The steps of a directory as the first process sees them."""
    return json.loads(all_gather_text(json.dumps(steps_in(directory)), what="restore")[0])


def verify_step(
    step: Path, share: tuple[int, int] = (0, 1), progress: Progress = _ignore
) -> list[Damage]:
    """The damages of a step, or a folder whose name is not the number of the step in it."""
    found = find_damages(step, share, progress)
    if found:
        return found
    try:
        number = StepInfo.read(step).step
    except DamagedInfoError:  # its checksum is right: somebody else has written it
        return [Damage(DESCRIPTION, "is no description of a step")]
    if number != int(step.name):
        return [Damage(DESCRIPTION, f"is of step {number}: the folder was renamed or copied")]
    return found


def _damages_found_together(step: Path) -> list[Damage]:
    """The damages of a step; each process reads its share of the files."""
    own = verify_step(step, (jax.process_index(), jax.process_count()))
    said = all_gather_text(json.dumps([[x.file, x.what, x.arrays] for x in own]), what="restore")
    found = [Damage(f, w, tuple(x)) for text in said.values() for f, w, x in json.loads(text)]
    return list(dict.fromkeys(found))


def _list_damages(directory: Path, damages: Mapping[int, list[Damage]]) -> str:
    """A message with a line for each damage."""
    lines = []
    for step, found in damages.items():
        lines.append(f"step {step} in {directory} is damaged:")
        lines += [f"  {damage}" for damage in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return "\n".join(lines)


def process_manifest(process: int) -> str:
    """The manifest of one process, within a step."""
    return f"{PROCESS_MANIFESTS}/process_{process}.json"


def write_process_manifest(
    step: Path, process: int, files: Iterable[str], ranges: Mapping[str, Sequence[Range]]
) -> None:
    """Lists the files of one process, with the bytes of each array in them, and syncs them."""
    listed = {name: _segments(step / name, ranges.get(name, ())) for name in sorted(files)}
    for name in listed:
        fsync(step / name)
    write_file(step / process_manifest(process), _sealed(listed))


def write_combined_manifest(step: Path, processes: int) -> None:
    """Lists the files that no process listed, and all manifests: then the step is complete."""
    known: Listed = {}
    for rank in range(processes):
        listed = _unsealed((step / process_manifest(rank)).read_bytes())
        known |= {name: listed[name] if _is_in(DATA, name) else None for name in listed}
    rest = sorted(_files(step) - known.keys())
    for name in rest:
        fsync(step / name)
    write_file(step / MANIFEST, _sealed(known | {x: _segments(step / x, ()) for x in rest}))
    for folder, _, _ in os.walk(step):
        fsync(Path(folder))


def write_manifests(folder: Path) -> None:
    """Lists all files of a folder that one process wrote."""
    (folder / PROCESS_MANIFESTS).mkdir()
    write_process_manifest(folder, 0, _files(folder), {})
    write_combined_manifest(folder, 1)


def find_damages(
    step: Path, share: tuple[int, int] = (0, 1), progress: Progress = _ignore
) -> list[Damage]:
    """The files of a step that differ from what was written.

    With the share `(i, n)` it reads the files in every n-th manifest from the i-th on, or a part
    of them where there are fewer manifests. The first share finds all additional files, and warns
    of those that nothing reads. `progress` is called for each block that was read.
    """
    number, count = share
    try:
        listed = read_combined_manifest(step)
        manifests = sorted(name for name in listed if _is_in(PROCESS_MANIFESTS, name))
        rest = sorted(listed.keys() - manifests - {x for x in listed if _is_in(DATA, x)})
        rest = [name for name in rest if listed[name] is not None]
        own = {name: listed[name] for name in rest[number::count]}
        for name, part, parts in _share(manifests, number, count):
            of_process = _read_manifest(step, name, listed[name])
            own |= {x: of_process[x] for x in sorted(of_process)[part::parts]}
        found = _find_additional(step, listed) if number == 0 else []
    except DamagedFileError as error:
        return [error.args[0]]
    for name in sorted(own):
        found += _damages_of_file(step, name, own[name], progress)
    return found


def _share(manifests: Sequence[str], number: int, count: int) -> list[tuple[str, int, int]]:
    """The manifests that one of `count` processes reads, and which part of each, of how many."""
    known = len(manifests)
    return [
        (manifests[i], number // known, max(1, -((i - count) // known)))
        for i in range(number % known, known, count)
    ]


def _is_in(folder: str, name: str) -> bool:
    return PurePosixPath(name).parent.as_posix() == folder


def _find_additional(step: Path, listed: Collection[str]) -> list[Damage]:
    """The files that are not of a step; it warns of those that nothing reads."""
    extra = sorted(_files(step) - {MANIFEST} - {*listed})
    harmless = [name for name in extra if _is_harmless(step, name)]
    if harmless:
        warn(f"{step} holds files that are not of this step, and are not read: {some(harmless)}.")
    return [Damage(name, "is not of this step") for name in extra if name not in harmless]


def read_combined_manifest(step: Path) -> Listed:
    """The files of a step, but for this manifest; None for one that a process's manifest lists.

    The segments of data states are in it too, so that they can be compared without being read.

    Raises:
      DamagedFileError: it, or a manifest that it needs, is damaged.
    """
    listed = _read_manifest(step, MANIFEST, None)
    manifests = [name for name in listed if _is_in(PROCESS_MANIFESTS, name)]
    if not manifests:  # another manifest in its place
        raise DamagedFileError(Damage(MANIFEST, "differs from what was written"))
    if None not in listed.values():  # an earlier gshard wrote it, without these names
        for name in manifests:
            listed |= _read_manifest(step, name, listed[name])
    return listed


def size_of(step: Path) -> int:
    """The bytes of all files of a step."""
    found = [path.lstat() for path in step.rglob("*")]
    return sum(x.st_size for x in found if stat.S_ISREG(x.st_mode))


def _is_harmless(step: Path, name: str) -> bool:
    """Whether an additional file is one that nothing reads, such as `.DS_Store`."""
    path = PurePosixPath(name)
    is_hidden = path.name.startswith(".") or path.name.endswith("~")
    if not is_hidden and path.parts[:-1] and path.parts[-2] in _LISTED_FOLDERS:
        return False
    return stat.S_ISREG((step / name).lstat().st_mode)


class DamagedFileError(Exception):
    """Raised with the `Damage` because of which the other files are not known."""


def _read_manifest(step: Path, name: str, segments: Sequence[Segment] | None) -> Listed:
    """The files that a manifest lists; it is compared with its own segments first, if given."""
    if found := _damages_of_file(step, name, segments):
        raise DamagedFileError(found[0])
    try:
        return _unsealed(read_regular(step / name, _MOST))
    except OSError as error:
        raise DamagedFileError(Damage(name, f"cannot be read ({error.strerror})")) from error
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedFileError(Damage(name, "differs from what was written")) from None


def _sealed(listed: Mapping[str, Sequence[Segment] | None]) -> bytes:
    """A manifest: one line of JSON, and one with its CRC-32."""
    line = json.dumps(listed, separators=(",", ":"), sort_keys=True).encode() + b"\n"
    return line + b"%08x\n" % crc32(line)


def _unsealed(data: bytes) -> Listed:
    line, end, seal = data[:-9], data[-10:-9], data[-9:]
    if end != b"\n" or seal != b"%08x\n" % crc32(line):
        raise ValueError("the seal is broken")
    listed = json.loads(line)
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


def _files(step: Path) -> set[str]:
    """The path of everything in a step that is not a folder, within the step."""

    def refuse(error: OSError) -> None:
        name = Path(str(error.filename)).relative_to(step).as_posix()
        raise DamagedFileError(Damage(name, f"cannot be read ({error.strerror})"))

    found: set[str] = set()
    for folder, folders, names in os.walk(step, onerror=refuse):
        inside = Path(folder)
        links = [name for name in folders if (inside / name).is_symlink()]
        found |= {(inside / name).relative_to(step).as_posix() for name in [*names, *links]}
    return found


def _segments(path: Path, ranges: Sequence[Range]) -> list[Segment]:
    """The segments of a file; together they hold every byte."""
    size, at, parts = path.stat().st_size, 0, list[tuple[int, str | None]]()
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
    found = _checksums(path, [length for length, _ in cut])
    if -1 in found:
        raise OSError(f"{path} became shorter while it was read")
    return [(n, total, array) for (n, array), total in zip(cut, found, strict=True)]


def _checksums(path: Path, lengths: Sequence[int], progress: Progress = _ignore) -> list[int]:
    """CRC-32 of each of the segments of a file; -1 for one that ends early."""

    def checksum(number: int, start: int, length: int) -> int:
        total, end = 0, start + length
        while start < end and (block := os.pread(number, min(end - start, _BLOCK), start)):
            total, start = crc32(block, total), start + len(block)
            progress(len(block))
        return total if start == end else -1

    with path.open("rb") as file, ThreadPoolExecutor(_THREADS) as pool:
        run, starts = partial(checksum, file.fileno()), accumulate(lengths, initial=0)
        return list((pool.map if len(lengths) > 1 else map)(run, starts, lengths))


def _damages_of_file(
    step: Path, name: str, segments: Sequence[Segment] | None, progress: Progress = _ignore
) -> list[Damage]:
    """The damages of a file; without its segments, only of its kind."""
    path, arrays = step / name, _arrays_in(segments or ())
    try:
        if not os.path.lexists(path):
            return [Damage(name, "is missing", arrays)]
        if not path.is_file() or path.is_symlink():  # reading a pipe would block
            return [Damage(name, "is no regular file")]
        if segments is None:
            return []
        expected = sum(length for length, _, _ in segments)
        if (size := path.stat().st_size) != expected:
            return [Damage(name, f"has {size:,} bytes instead of {expected:,}", arrays)]
        found = _checksums(path, [length for length, _, _ in segments], progress)
    except OSError as error:
        return [Damage(name, f"cannot be read ({error.strerror})", arrays)]
    bad = [x for x, checksum in zip(segments, found, strict=True) if x[1] != checksum]
    return [Damage(name, "differs from what was written", _arrays_in(bad))] if bad else []


def _arrays_in(segments: Iterable[Segment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for _, _, path in segments if path is not None))
