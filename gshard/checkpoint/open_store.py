"""`open_store`: the store that a user's path or address names; `resolve` tells which it is."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from gshard._util.durable import refuse_variables
from gshard._util.errors import GShardError
from gshard.checkpoint.bucket import SCHEMES, Bucket
from gshard.checkpoint.disk import Disk, as_directory
from gshard.checkpoint.object_store import ObjectStore
from gshard.checkpoint.step_files import StoreError
from gshard.checkpoint.step_info import DESCRIPTION, MANIFEST, STEP
from gshard.checkpoint.store import Store

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,2})(.*)", re.DOTALL)


def open_store(address: Any) -> Store:
    """The store at a path or an address; nothing is made there yet."""
    where, in_store = resolve(address, "directory")
    folder = where.rstrip("/") if in_store else as_directory(where)
    parent, name = os.path.split(folder)
    if STEP.fullmatch(name) and _has_description(folder):
        raise GShardError(
            f"directory={str(where)!r} is step {name} of the checkpoints in {parent}. Pass that "
            "directory, and the step to restore: "
            f"gshard.Checkpointer({parent!r}).restore(step={name}, like=...)."
        )
    return Disk(folder) if isinstance(folder, Path) else ObjectStore(folder)


def _has_description(folder: Path | str) -> bool:
    if isinstance(folder, Path):
        return (folder / DESCRIPTION).is_file()
    with suppress(StoreError):  # as the next call says
        return Bucket(folder).exists(DESCRIPTION)
    return False


def resolve(given: Any, argument: str) -> tuple[Any, bool]:
    """An address of an object store and True; or what must be a path of a file system, and False.

    `argument` names it in a `GShardError`.
    """
    refuse_variables(given, argument)
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return given, False
    scheme, slashes, rest = match.groups()
    if scheme == "file" and slashes == "//" and rest.startswith("/"):
        return rest, False
    if slashes == "/" and scheme in SCHEMES:
        raise GShardError(
            f"{argument}={text} lacks a slash, which pathlib removes. Pass the address as "
            f"a string: {scheme}://{rest}"
        )
    if slashes == "/":
        return given, False
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise GShardError(
            f"{argument}={text!r} has the scheme {scheme}://. gshard knows {known}, file:/// "
            "and paths of file systems."
        )
    if not rest.strip("/") or rest.startswith("/"):
        raise GShardError(f"{argument}={text!r} names no bucket: {scheme}://BUCKET/PATH.")
    return text, True


def open_step_or_store(address: Any) -> tuple[Store, int | None]:
    """The store at an address, and the step if the address is that of a step."""
    head, _, name = str(address).rstrip("/").rpartition("/")
    if STEP.fullmatch(name) and head.partition("://")[2]:
        above = open_store(head)
        if int(name) in above.steps() or _has_description(f"{head}/{name}"):
            return above, int(name)
    where, in_store = resolve(address, "directory")
    if not in_store and STEP.fullmatch((folder := as_directory(where)).name):
        if any((folder / file).exists() for file in (MANIFEST, DESCRIPTION)):
            return Disk(folder.parent), int(folder.name)
    return open_store(address), None
