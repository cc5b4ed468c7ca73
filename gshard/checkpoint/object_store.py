"""`ObjectStore`: the steps of a run on `gs://` or `s3://`.

A step has the same files as on a disk, but nothing is renamed: its objects are written under its
number, and it is complete when `manifest.json` is there, which is written last and only if there is
none. Each process writes its files into a folder of its machine first, as it would on a disk, and
then copies them.

A process uploads its manifest under `.draft/TOKEN`, and the first process gives it its name with
the commit. Each draft has a token of its own. So what another job, or a save that was given up,
still writes is never taken for a part of this step.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import jax

from gshard._util.errors import GShardError
from gshard._util.scratch import scratch_folder
from gshard.checkpoint.bucket import REQUESTS, Bucket
from gshard.checkpoint.lease import Lease
from gshard.checkpoint.manifest import (
    PROCESS_MANIFESTS,
    is_in,
    process_manifest,
    unsealed,
)
from gshard.checkpoint.object_reader import ObjectReader, copy_parts, parts_of
from gshard.checkpoint.orbax import ARRAYS, METADATAS
from gshard.checkpoint.own_files import begin_files, combine
from gshard.checkpoint.step_files import (
    Progress,
    StepFolder,
    StoreError,
    checksums_of,
    ignore,
    run_parallel,
)
from gshard.checkpoint.step_info import DAMAGED, DATA, DESCRIPTION, MANIFEST, STEP, StepInfo

_DRAFT = ".draft"
_TOKEN = f"{_DRAFT}/token"
_BLOCK = 2**24  # bytes of one request
_LATE = re.compile(  # what a writer that was cut off may still upload, once its step was deleted
    rf"{re.escape(_DRAFT)}/.*|({PROCESS_MANIFESTS}|{DATA})/process_\d+\.json|{ARRAYS}/("
    r"_METADATA|_sharding|array_metadatas/process_\d+|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/\w+))"
)


class ObjectStore:
    """The steps below an address of an object store."""

    is_shared = True
    is_remote = True

    def __init__(self, address: str):
        self.directory = address.rstrip("/")
        self._bucket = Bucket(address)
        self._lease = Lease(self._bucket)
        self._complete: set[str] | None = None  # known steps, while nobody else deletes them

    def __str__(self) -> str:
        return self.directory

    def steps(self) -> list[int]:
        """The steps whose commit object is there, ascending."""
        return sorted(int(name) for name, complete in self._numbers().items() if complete)

    def _numbers(self) -> dict[str, bool]:
        """The folders that are named as steps, and whether they are complete."""
        names = [x for x, folder in self._bucket.list().items() if folder and STEP.fullmatch(x)]
        known = self._complete or set[str]()
        others = [name for name in names if name not in known]
        commits = [f"{name}/{MANIFEST}" for name in others]
        there = zip(others, run_parallel(self._bucket.exists, commits, REQUESTS), strict=True)
        complete = known.intersection(names).union(name for name, exists in there if exists)
        if self._complete is not None:
            self._complete = complete
        return {name: name in complete for name in names}

    def step(self, number: int) -> ObjectFiles:
        """The files of a step."""
        return ObjectFiles(self._bucket, str(number))

    def why_empty(self) -> str:
        """Ends the sentence "<address> ..." about a store without steps."""
        return "holds no checkpoint."

    def reader(self, verify: bool) -> ObjectReader:
        """Reads arrays, and compares the checksums of what it reads if `verify`."""
        return ObjectReader(self.step, verify)

    def open_for_writing(self) -> None:
        """Takes the lease, and removes what killed and failed saves and deletions left."""
        self._lease.take()
        self._complete = set() if self._complete is None else self._complete
        for name, complete in self._numbers().items():
            if not complete and self._is_own(name):
                self.delete(int(name))

    def _is_own(self, name: str) -> bool:
        """Whether what is below a number is of a draft, or of one that was deleted."""
        there = self._bucket.list(name)
        known = there.keys() <= {_DRAFT, PROCESS_MANIFESTS, DATA, ARRAYS}
        return DESCRIPTION in there or known and all(map(_LATE.fullmatch, self._bucket.find(name)))

    def close(self) -> None:
        """Releases the lease."""
        self._complete = None
        self._lease.release()

    def draft(self, step: int, token: str) -> ObjectDraft:
        """A draft of a step."""
        return ObjectDraft(self._bucket, self._lease, step, token)

    def is_taken(self, step: int) -> bool:
        """Whether there is an object below that number."""
        return bool(self._bucket.list(str(step)))

    def check_room(self, size: int) -> None:
        """Raises an `OSError` if this machine has no room for this process's part of a step."""
        folder = tempfile.gettempdir()
        free, part = shutil.disk_usage(folder).free, size // jax.process_count()
        if part > free:
            raise OSError(
                f"{folder} has {free:,} bytes free, and this process writes {part:,} there "
                "before it copies them. Set TMPDIR to a larger folder"
            )

    def set_aside(self, step: int) -> str:
        """Copies a damaged step to another name, and deletes it."""
        aside = f"{step}{DAMAGED}"
        self._bucket.delete([f"{aside}/{name}" for name in self._bucket.find(aside)])
        names = self._bucket.find(str(step))
        run_parallel(
            lambda name: self._bucket.copy(f"{step}/{name}", f"{aside}/{name}"), names, REQUESTS
        )
        self.delete(step)
        return f"{self}/{aside}"

    def delete(self, step: int) -> None:
        """Deletes a step: its commit object first, and last what tells that gshard wrote it."""
        if self._complete is not None:
            self._complete.discard(str(step))
        ordered = (MANIFEST, _TOKEN, DESCRIPTION)  # without its token, a draft is not committed
        rest = self._bucket.find(str(step)).keys() - ordered
        for part in ([MANIFEST], [_TOKEN], rest, [DESCRIPTION]):  # also if a list lags behind
            self._bucket.delete([f"{step}/{name}" for name in part])


class ObjectFiles:
    """The files of a step in an object store."""

    def __init__(self, bucket: Bucket, name: str):
        self._bucket, self.name = bucket, name

    def __str__(self) -> str:
        return f"{self._bucket}/{self.name}"

    @cached_property
    def _sizes(self) -> dict[str, int]:
        found = self._bucket.find(self.name)
        return {name: size for name, size in found.items() if not name.startswith(f"{_DRAFT}/")}

    def names(self) -> set[str]:
        """The names of all objects."""
        return {*self._sizes}

    def is_regular(self, name: str) -> bool:
        """True for every object; a `FileNotFoundError` if there is none."""
        self.size(name)
        return True

    def size(self, name: str) -> int:
        """The bytes of an object."""
        if name not in self._sizes:
            raise FileNotFoundError(f"{self}/{name}")
        return self._sizes[name]

    def read(self, name: str, most: int) -> bytes:
        """The content of an object; an `OSError` if it has more than `most` bytes."""
        if (size := self.size(name)) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are allowed")
        return self._bucket.read(f"{self.name}/{name}", 0, size)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Some bytes of an object; fewer if it ends before."""
        return self._bucket.read(f"{self.name}/{name}", start, min(end, self.size(name)))

    def checksums(
        self, name: str, lengths: Sequence[int], progress: Progress = ignore
    ) -> list[int]:
        """CRC-32 of each of the segments of an object; -1 for one that ends early."""
        return checksums_of(
            lambda start, size: self.read_range(name, start, start + size),
            lengths,
            progress,
            _BLOCK,
            REQUESTS,
        )


class ObjectDraft:
    """A step that is being written: in a folder of this machine, and from there in the store."""

    def __init__(self, bucket: Bucket, lease: Lease, step: int, token: str):
        self.step, self._token = step, token
        self._bucket, self._lease = bucket, lease
        self._folder: Path | None = None
        self._uploaded: set[str] = set()  # files that are in the store

    def __str__(self) -> str:
        return f"{self._bucket}/{self.step}"

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        if self._folder is None:
            self._folder = scratch_folder(f"save-{self.step}")
        return self._folder

    def make(self, info: StepInfo) -> None:
        """Writes the description, which tells that gshard writes here."""
        self._bucket.create(f"{self.step}/{DESCRIPTION}", info.to_json())
        self._bucket.create(f"{self.step}/{_TOKEN}", self._token.encode())

    def join(self) -> None:
        """Makes the folder of this process."""
        for name in (ARRAYS, PROCESS_MANIFESTS, DATA):
            (self.folder / name).mkdir()
        if jax.process_index() != 0:  # else Orbax waits until the first process makes it
            (self.folder / METADATAS).mkdir()
        else:  # it lists the description
            content = self._bucket.read(f"{self.step}/{DESCRIPTION}")
            (self.folder / DESCRIPTION).write_bytes(content)
            self._uploaded = {DESCRIPTION}
        try:
            self._check_token()
        except FileNotFoundError:
            raise GShardError(
                f"save: process {jax.process_index()} does not see {self}, which process 0 has "
                "made. All processes need one address."
            ) from None

    def begin(self, arrays: Mapping[str, jax.Array], data: bytes | None) -> Callable[[], None]:
        """Begins to write this process's files into its folder; they are uploaded at the end."""
        finish = begin_files(self.folder, arrays, data)
        return lambda: self._upload(finish())

    def _upload(self, names: Sequence[str]) -> None:
        """Copies this process's files to the store, its manifest last."""
        *files, own = names
        self._copy(files)
        name = f"{self.step}/{_DRAFT}/{self._token}/{Path(own).name}"
        self._bucket.create(name, self.folder / own)
        if jax.process_index() != 0:
            self._remove_folder()

    def _copy(self, names: Iterable[str]) -> None:
        files = [*names]
        run_parallel(
            lambda name: self._bucket.create(f"{self.step}/{name}", self.folder / name),
            files,
            REQUESTS,
        )
        self._uploaded |= {*files}

    def written_manifests(self) -> set[str]:
        """The names of the process manifests that are in the store."""
        return {*self._bucket.list(f"{self.step}/{_DRAFT}/{self._token}")}

    def combine(self, processes: int) -> None:
        """Lists the files of all, after reading what describes the arrays in those of others."""
        ranks = [rank for rank in range(processes) if rank != jax.process_index()]
        files = ObjectFiles(self._bucket, str(self.step))
        files.names()  # listed once, for all
        run_parallel(partial(self._collect, files), ranks, REQUESTS)
        combine(self.folder, processes)

    def _collect(self, files: ObjectFiles, rank: int) -> None:
        name = Path(process_manifest(rank)).name
        content = self._bucket.read(f"{self.step}/{_DRAFT}/{self._token}/{name}")
        (self.folder / process_manifest(rank)).write_bytes(content)
        described = {
            file: [part for part in parts_of(segments or ()) if part.array is None]
            for file, segments in unsealed(content).items()
        }
        copied = {file: parts for file, parts in described.items() if not is_in(DATA, file)}
        if damages := copy_parts(files, copied, self.folder):
            raise OSError(f"{self}/{damages[0]}")
        self._uploaded |= {*described}

    def commit(self) -> str:
        """Copies the last files, and the commit object after them."""
        names = StepFolder(self.folder).names() - self._uploaded
        self._copy(names - {MANIFEST})
        # As late as possible: a writer that took over has deleted the token of this draft.
        self._lease.check()
        self._check_token()
        self._bucket.create(f"{self.step}/{MANIFEST}", self.folder / MANIFEST)
        self._remove_folder()
        with suppress(StoreError, OSError):  # nobody reads them
            drafts = self._bucket.find(f"{self.step}/{_DRAFT}")
            self._bucket.delete([f"{self.step}/{_DRAFT}/{name}" for name in drafts])
        return str(self)

    def _check_token(self) -> None:
        if self._bucket.read(f"{self.step}/{_TOKEN}").decode() != self._token:
            raise GShardError(
                f"{self}: another job has taken over this step, so this save is not completed. End "
                "one of the two, or give each an address of its own."
            )

    def is_open(self) -> bool:
        """Whether the commit object is not there, but the draft."""
        try:
            complete = self._bucket.exists(f"{self.step}/{MANIFEST}")
            return not complete and self._bucket.exists(f"{self.step}/{DESCRIPTION}")
        except StoreError:  # no network
            return True

    def discard(self) -> None:
        """Deletes the folder; the next save deletes what is in the store."""
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
