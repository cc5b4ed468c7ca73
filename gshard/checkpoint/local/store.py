"""`LocalStore`: the newest steps of a run in a folder of this machine, of each process its shards.

Each process has a folder there, named by its place among the processes of its machine, and commits
its part of a step alone: nothing is sent. Whether the machines have all of a step together is found
out when it is read. Parts of one save have one token, so those of two saves are never mixed.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax

from gshard._util.durable import make_folder
from gshard._util.errors import GShardError
from gshard.checkpoint.disk import Disk, DiskDraft, as_directory
from gshard.checkpoint.local.shards import (
    INDEX,
    Bounds,
    Index,
    Key,
    bounds_of,
    copy_to_host,
    read_index,
    write_shards,
)
from gshard.checkpoint.manifest import process_manifest
from gshard.checkpoint.step_info import STEP, StepInfo
from gshard.distributed.agree import all_gather_text, run_on_all

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CALL = "Checkpointer(local=...)"


class LocalStore(Disk):
    """The steps of this process in its folder of the machine. All processes must make one.

    Args:
      folder: the folder of this machine.
      run: the address of the run's directory.
      rhythm: how often steps are saved, which must be the same on all processes.

    Raises:
      GShardError: the folder holds steps of another run, or is shared by several machines.
    """

    is_shared = False

    def __init__(self, folder: Path, run: str, rhythm: str):
        self.machine, self.run = folder, run
        own = run_on_all(lambda: _machine(folder, run), call=_CALL, what=lambda: rhythm)
        self._machines = all_gather_text(own, what=_CALL)  # by rank
        rank = jax.process_index()
        self._here = [r for r, machine in sorted(self._machines.items()) if machine == own]
        self._place = self._here.index(rank)
        super().__init__(folder / str(self._place))
        drawn = all_gather_text(secrets.token_hex(8), what=_CALL)
        self._session, self._saves = drawn[min(drawn)], 0
        run_on_all(lambda: self._note(own), call=_CALL)
        run_on_all(lambda: self._check_note(own), call=_CALL)

    def __str__(self) -> str:
        return str(self.machine)

    def _note(self, own: str) -> None:
        """Writes which machine this is, for other machines that see the folder to find."""
        if self._place == 0:
            (self.machine / "machine").write_text(json.dumps([own, self.run]))

    def _check_note(self, own: str) -> None:
        if json.loads((self.machine / "machine").read_text())[0] != own:
            raise GShardError(
                f"local={str(self.machine)!r} is one folder of several machines. Choose a folder "
                "that each has of its own, in memory (/dev/shm) or on its own disk."
            )

    def why_empty(self) -> str:
        """Ends the sentence "<address> ..." about a machine without steps."""
        return "holds no step."

    def open_for_writing(self) -> None:
        """Locks this process's folder, and removes debris and folders of processes of before."""
        super().open_for_writing()
        if self._place == 0:
            for folder in _of_processes(self.machine):
                if int(folder.name) >= len(self._here):
                    shutil.rmtree(folder, ignore_errors=True)

    def _written_last(self, name: str) -> list[Path]:
        return [self.directory / name / INDEX]

    def draft(self, step: int, attempt: int) -> LocalDraft:
        """A draft of this process's part of a step."""
        path = super().draft(step, attempt).folder
        return LocalDraft(path, step, f"{self._session}-{self._saves}", self._others_keep)

    def next_save(self) -> None:
        """Another token from now on; called before each save, on every process."""
        self._saves += 1

    def parts(self, step: int) -> Iterator[Index]:
        """What the processes of this machine have of a step, as far as it can be read."""
        for folder in _of_processes(self.machine):
            with suppress(OSError, ValueError, KeyError, TypeError):  # it counts as lost
                yield read_index(folder / str(step))

    def _others_keep(self, arrays: Mapping[str, jax.Array]) -> set[Key]:
        """The shards of this process that an earlier one of this machine writes."""
        before = frozenset(r for r in self._here if r < jax.process_index())
        found: set[Key] = set()
        for path, x in arrays.items() if before else ():
            found |= {Key(path, b) for b in _held_by(before, x.sharding, x.shape)}
        return found


class LocalDraft(DiskDraft):
    """The part of a step that one process writes."""

    def __init__(
        self,
        folder: Path,
        step: int,
        token: str,
        others_keep: Callable[[Mapping[str, jax.Array]], set[Key]],
    ):
        super().__init__(folder, step)
        self._token, self._others_keep = token, others_keep

    def make(self, info: StepInfo) -> None:
        """Makes the folder."""
        self.folder.mkdir()

    def begin(self, arrays: Mapping[str, jax.Array], data: Any) -> Callable[[], object]:
        """Copies the shards of this process to the host; `data` is noted beside them."""
        shards = copy_to_host(arrays, self._others_keep(arrays))
        noted = {"token": self._token, "rank": jax.process_index(), **data}
        return lambda: write_shards(self.folder, shards, noted)

    def written_manifests(self) -> set[str]:
        """As if it were the only process that writes."""
        return {Path(process_manifest(0)).name} if (self.folder / INDEX).exists() else set()

    def combine(self, processes: int) -> None:
        """Does nothing: the part is complete."""

    def discard(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def local_folder(path: Any) -> Path:
    """The folder of this machine that a user names."""
    if isinstance(path, str) and "://" in path and not path.startswith("file://"):
        raise GShardError(f"local={path!r} is an address. Choose a folder of each machine.")
    try:
        return as_directory(path)
    except GShardError as error:
        raise GShardError(str(error).replace("directory=", "local=")) from error


def _machine(folder: Path, run: str) -> str:
    """What tells this machine's folder from that of any other."""
    if not folder.exists():
        make_folder(folder)
        folder.chmod(0o700)  # /dev/shm belongs to all users of a machine
    other = run
    with suppress(OSError, ValueError):
        other = json.loads((folder / "machine").read_text())[1]
    if other != run and any(_steps_in(folder)):
        raise GShardError(
            f"local={str(folder)!r} holds the newest steps of the run in {other}. Choose another "
            "folder, or delete it if that run will not go on."
        )
    about = folder.stat()
    return f"{_BOOT.read_text().strip() if _BOOT.exists() else ''} {about.st_dev} {about.st_ino}"


def _of_processes(machine: Path) -> list[Path]:
    return sorted(x for x in machine.iterdir() if STEP.fullmatch(x.name) and x.is_dir())


def _steps_in(machine: Path) -> Iterator[Path]:
    for folder in _of_processes(machine):
        yield from (x for x in folder.iterdir() if STEP.fullmatch(x.name))


@cache
def _held_by(ranks: frozenset[int], sharding: Any, shape: tuple[int, ...]) -> frozenset[Bounds]:
    """The shards of an array that devices of these processes hold."""
    indices = sharding.devices_indices_map(shape)
    return frozenset(bounds_of(x, shape) for d, x in indices.items() if d.process_index in ranks)
