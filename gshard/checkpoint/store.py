"""Where the steps of a run are: `Store`, which a folder and an object store implement.

A step is complete or it is not there. It is written as a `Draft`: each process writes its files,
and the first process commits the draft when all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from gshard.checkpoint.checksums import Damage
from gshard.checkpoint.step_files import StepFiles
from gshard.checkpoint.step_info import StepInfo

Wanted = Mapping[str, jax.ShapeDtypeStruct]  # arrays to read, by path, with their shardings
Wants = Callable[[StepInfo], Iterable[Wanted]]  # what to read of a step


class Draft(Protocol):
    """A step that is being written. `str` of it says where."""

    step: int

    @property
    def folder(self) -> Path:
        """The folder in which this process writes its files."""
        ...

    def make(self, info: StepInfo) -> None:
        """Begins the draft; called by the first process."""
        ...

    def join(self) -> None:
        """Makes sure that this process can write into `folder`; called by every process."""
        ...

    def begin(self, arrays: Mapping[str, jax.Array], data: Any) -> Callable[[], object]:
        """Copies this process's shards to the host, and begins to write them.

        After this returns, the arrays may be donated or deleted. The function that is returned
        waits until the files of this process are where the first process finds them.
        """
        ...

    def written_manifests(self) -> set[str]:
        """The names of the process manifests that are uploaded, without their folder."""
        ...

    def combine(self, processes: int) -> None:
        """Lists the files of all processes; called by the first one."""
        ...

    def commit(self) -> str:
        """Makes the draft a step, at once, and returns its address; called by the first process."""
        ...

    def is_open(self) -> bool:
        """Whether it was neither committed nor discarded."""
        ...

    def discard(self) -> None:
        """Deletes what this process has written, as far as it can."""
        ...


class Reader(Protocol):
    """Reads arrays of the steps of a store; a context that leaves nothing behind."""

    def damages(self, step: int, wants: Wants) -> list[Damage]:
        """What this process finds damaged, in its share or in what it is about to read."""
        ...

    def files(self, step: int) -> StepFiles:
        """The files that describe the step, and the data states."""
        ...

    def read(self, step: int, wanted: Wanted) -> dict[str, jax.Array]:
        """Arrays of the step by path, with the shapes, dtypes and shardings of `wanted`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Store(Protocol):
    """The steps of a run. `str` of it is its address."""

    is_shared: bool  # by all processes; else each has its own, of its shards
    is_remote: bool  # what was read is not read again, where a request takes long and costs money

    @property
    def directory(self) -> Path | str:
        """The path of a directory, or the address of an object store."""
        ...

    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        ...

    def step(self, number: int) -> StepFiles:
        """The files of a step."""
        ...

    def why_empty(self) -> str:
        """Ends the sentence "<address> ..." about a store without steps."""
        ...

    def reader(self, verify: bool) -> Reader:
        """Reads arrays, and compares checksums if `verify`."""
        ...

    def open_for_writing(self) -> None:
        """Refuses other writers from now on, and removes what killed and failed saves left.

        Raises:
          CallOrderError: another process writes there.
        """
        ...

    def close(self) -> None:
        """Lets others write."""
        ...

    def draft(self, step: int, token: str) -> Draft:
        """A draft of a step. The token is the same on all processes, and of this save alone."""
        ...

    def is_taken(self, step: int) -> bool:
        """Whether something that is no draft of a step is there under its number."""
        ...

    def check_room(self, size: int) -> None:
        """Raises an `OSError` if a state of that many bytes does not fit."""
        ...

    def set_aside(self, step: int) -> str:
        """Gives a damaged step another name, so that it can be examined; returns its address."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a step: at once for readers, then file by file."""
        ...
