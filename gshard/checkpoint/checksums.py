"""Whether the files of a step are what their manifests say, and what a damaged byte belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gshard._util.errors import GShardError, some, warn
from gshard.checkpoint.manifest import PROCESS_MANIFESTS, Listed, Segment, is_in, unsealed
from gshard.checkpoint.step_files import Progress, StepFiles, StoreError, ignore, may_pass, why
from gshard.checkpoint.step_info import DATA, DESCRIPTION, MANIFEST, DamagedInfoError, StepInfo

_LISTED_FOLDERS = (PROCESS_MANIFESTS, DATA, "array_metadatas")  # read by the names in them
_MOST = 2**28  # bytes of a manifest
DIFFERS = "differs from what was written"


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

    __module__ = "gshard"

    def __init__(self, message: str, damages: Mapping[int, list[Damage]]):
        super().__init__(message)
        self.damages: dict[int, list[Damage]] = dict(damages)


def verify_step(
    step: StepFiles, share: tuple[int, int] = (0, 1), progress: Progress = ignore
) -> list[Damage]:
    """The damages of a step, or a folder whose name is not the number of the step in it."""
    return find_damages(step, share, progress) or check_description(step)


def check_description(step: StepFiles) -> list[Damage]:
    """The damage of a description whose checksum is right, if it is of another step or of none."""
    try:
        number = StepInfo.read(step).step
    except DamagedInfoError:  # somebody else has written it
        return [Damage(DESCRIPTION, "is not a description of a step")]
    if number != int(step.name):
        return [Damage(DESCRIPTION, f"is of step {number}: the folder was renamed or copied")]
    return []


def find_damages(
    step: StepFiles, share: tuple[int, int] = (0, 1), progress: Progress = ignore
) -> list[Damage]:
    """The files of a step that differ from what was written.

    With the share `(i, n)` it reads the files in every n-th manifest from the i-th on, or a part
    of them where there are fewer manifests. The first share finds all additional files, and warns
    of those that nothing reads. `progress` is called for each block that was read.
    """
    number, count = share
    try:
        listed = read_combined_manifest(step)
        manifests = sorted(name for name in listed if is_in(PROCESS_MANIFESTS, name))
        rest = sorted(listed.keys() - manifests - {x for x in listed if is_in(DATA, x)})
        rest = [name for name in rest if listed[name] is not None]
        own = {name: listed[name] for name in rest[number::count]}
        for name, part, parts in _share(manifests, number, count):
            of_process = read_manifest(step, name, listed[name])
            own |= {x: of_process[x] for x in sorted(of_process)[part::parts]}
        found = _find_additional(step, listed) if number == 0 else []
    except DamagedFileError as error:
        return [error.args[0]]
    except OSError as error:  # of a folder in the step
        name = PurePosixPath(str(error.filename)).relative_to(str(step)).as_posix()
        return [_unread(step, name, error)]
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


def _find_additional(step: StepFiles, listed: Collection[str]) -> list[Damage]:
    """The files that are not of a step; it warns of those that nothing reads."""
    extra = sorted(step.names() - {MANIFEST} - {*listed})
    harmless = [name for name in extra if _is_harmless(step, name)]
    if harmless:
        warn(f"{step} holds files that are not of this step, and are not read: {some(harmless)}.")
    return [Damage(name, "is not of this step") for name in extra if name not in harmless]


def read_combined_manifest(step: StepFiles) -> Listed:
    """The files of a step, but for this manifest; None for one that a process's manifest lists.

    The segments of data states are in it too, so that they can be compared without being read.

    Raises:
      DamagedFileError: it is damaged.
    """
    listed = read_manifest(step, MANIFEST, None)
    if not any(is_in(PROCESS_MANIFESTS, name) for name in listed):  # another one in its place
        raise DamagedFileError(Damage(MANIFEST, DIFFERS))
    return listed


def _is_harmless(step: StepFiles, name: str) -> bool:
    """Whether an additional file is one that nothing reads, such as `.DS_Store`."""
    path = PurePosixPath(name)
    is_hidden = path.name.startswith(".") or path.name.endswith("~")
    if not is_hidden and path.parts[:-1] and path.parts[-2] in _LISTED_FOLDERS:
        return False
    return step.is_regular(name)


class DamagedFileError(Exception):
    """Raised with the `Damage` because of which the other files are not known."""


def read_manifest(step: StepFiles, name: str, segments: Sequence[Segment] | None) -> Listed:
    """The files that a manifest lists; it is compared with its own segments first, if given."""
    if found := _damages_of_file(step, name, segments):
        raise DamagedFileError(found[0])
    try:
        return unsealed(step.read(name, _MOST))
    except OSError as error:
        raise DamagedFileError(_unread(step, name, error)) from error
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedFileError(Damage(name, DIFFERS)) from None


def _damages_of_file(
    step: StepFiles, name: str, segments: Sequence[Segment] | None, progress: Progress = ignore
) -> list[Damage]:
    """The damages of a file; without its segments, only of its kind."""
    arrays = _arrays_in(segments or ())
    try:
        if not step.is_regular(name):  # reading a pipe would block
            return [Damage(name, "is not a regular file")]
        if segments is None:
            return []
        expected = sum(length for length, _, _ in segments)
        if (size := step.size(name)) != expected:
            return [Damage(name, f"has {size:,} bytes instead of {expected:,}", arrays)]
        found = step.checksums(name, [length for length, _, _ in segments], progress)
    except (FileNotFoundError, NotADirectoryError):
        return [Damage(name, "is missing", arrays)]
    except OSError as error:
        return [_unread(step, name, error, arrays)]
    bad = [x for x, checksum in zip(segments, found, strict=True) if x[1] != checksum]
    return [Damage(name, DIFFERS, _arrays_in(bad))] if bad else []


def _unread(step: StepFiles, name: str, error: OSError, arrays: tuple[str, ...] = ()) -> Damage:
    """The damage of a file that cannot be read; a `StoreError` if the file may be undamaged."""
    if may_pass(error):
        raise StoreError(
            f"{step}/{name} cannot be read: {why(error)}. That does not mean that it is damaged: "
            "check the file system and the permissions, and try again."
        ) from error
    return Damage(name, f"cannot be read ({why(error)})", arrays)


def _arrays_in(segments: Iterable[Segment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for _, _, path in segments if path is not None))
