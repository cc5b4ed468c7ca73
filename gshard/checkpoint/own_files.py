"""The files of one process in a step that is being written, and what combines those of all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import jax

from gshard._util.durable import write_file
from gshard.checkpoint import orbax
from gshard.checkpoint.data_state import data_state_name
from gshard.checkpoint.manifest import (
    process_manifest,
    write_combined_manifest,
    write_process_manifest,
)


def begin_files(
    folder: Path, arrays: Mapping[str, jax.Array], data: bytes | None
) -> Callable[[], list[str]]:
    """Copies this process's shards to the host, and begins to write them into an existing folder.

    The function that is returned waits until they are written, and returns the names of this
    process's files, the manifest with their checksums last.
    """
    if data is not None:
        write_file(folder / data_state_name(jax.process_index()), data)
    finish, paths = orbax.write(folder, arrays), [*arrays]

    def finish_files() -> list[str]:
        finish()
        return list_files(folder, paths)

    return finish_files


def list_files(folder: Path, arrays: Collection[str]) -> list[str]:
    """Writes the manifest of this process; returns the names of its files, the manifest last."""
    process = jax.process_index()
    files = orbax.files_of(folder, process)
    if (folder / data_state_name(process)).exists():
        files.append(data_state_name(process))
    write_process_manifest(folder, process, files, orbax.ranges_of(folder, process, arrays))
    return [*files, process_manifest(process)]


def combine(folder: Path, processes: int) -> None:
    """Merges what all processes have written, and writes the combined manifest."""
    orbax.merge(folder)
    write_combined_manifest(folder, processes)
