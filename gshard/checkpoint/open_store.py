"""`open_store`: the store that a user's path or address names."""

from __future__ import annotations

import os
import re
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.checkpoint.bucket import SCHEMES
from gshard.checkpoint.disk import Disk, as_directory
from gshard.checkpoint.object_store import ObjectStore
from gshard.checkpoint.step_info import MANIFEST, STEP
from gshard.checkpoint.store import Store

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,2})(.*)", re.DOTALL)


def open_store(address: Any) -> Store:
    """The store at a path or an address; nothing is made there yet."""
    text = os.fspath(address) if isinstance(address, os.PathLike) else address
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Disk(as_directory(address))
    scheme, slashes, rest = match.groups()
    if scheme == "file" and slashes == "//" and rest.startswith("/"):
        return Disk(as_directory(rest))
    if slashes == "/" and scheme in SCHEMES:
        raise GShardError(
            f"directory={shown(address)} lacks a slash, which pathlib removes. Pass the address as "
            f"a string: {scheme}://{rest}"
        )
    if slashes == "/":
        return Disk(as_directory(address))
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise GShardError(
            f"directory={text!r} has the scheme {scheme}://. gshard writes to {known}, file:/// "
            "and paths of file systems."
        )
    if not rest.strip("/") or rest.startswith("/"):
        raise GShardError(f"directory={text!r} names no bucket: {scheme}://BUCKET/PATH.")
    return ObjectStore(text)


def open_step_or_store(address: Any) -> tuple[Store, int | None]:
    """The store at an address, and the step if the address is that of a step."""
    head, _, name = str(address).rstrip("/").rpartition("/")
    if STEP.fullmatch(name) and head.partition("://")[2]:
        above = open_store(head)
        if int(name) in above.steps():
            return above, int(name)
    store = open_store(address)
    if isinstance(store, Disk) and STEP.fullmatch(store.directory.name):
        if (store.directory / MANIFEST).exists():
            return Disk(store.directory.parent), int(store.directory.name)
    return store, None
