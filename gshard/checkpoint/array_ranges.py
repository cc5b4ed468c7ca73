"""The bytes of each array in the files that Orbax wrote.

TensorStore keeps what its Python functions return as JSON for ever (0.1.86: one reference too many
on each value, 0.9 KB for each array of a step). So a process reads a limited number of entries
itself, and leaves the rest to a short-lived process of about 0.15 s. That runs this file as a
script, which imports only the standard library and TensorStore.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

_MOST = 10_000  # entries that this process reads itself, 9 MB at most
_VALUE = re.compile(r"value:([^:]*):([^:]*):(\d+):(\d+)")
_read = 0  # entries so far

Entry = tuple[str, str, int, int]  # key, file, offset, number of bytes


def ranges_of(
    folder: Path, inside: str, arrays: Collection[str]
) -> dict[str, list[tuple[int, int, str]]]:
    """The bytes of each array in each file of a folder that one process wrote.

    Orbax's format is OCDBT: a tree of keys, such as `params/w/c/0/1` for a block of an array, with
    the file, the offset and the length of each value. The files are named by their path `inside` of
    the step.
    """
    found: dict[str, list[tuple[int, int, str]]] = {}
    for key, file, offset, size in entries(folder):
        array = array_of(key, arrays)
        if array is not None:
            found.setdefault(f"{inside}/{file}", []).append((offset, size, array))
    return found


def entries(folder: Path) -> Sequence[Entry]:
    """Every block of every array in a folder of Orbax's, of one process or of all."""
    if _read >= _MOST:
        try:
            return _entries_by_child(folder)
        except (OSError, ValueError, subprocess.SubprocessError):  # no process can be started
            pass
    return _dumped(str(folder))


def _entries_by_child(folder: Path) -> Sequence[Entry]:
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-P", __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return [(key, file, offset, size) for key, file, offset, size in json.loads(done.stdout)]


def _dumped(folder: str) -> list[Entry]:
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    found: list[Entry] = []

    def visit(location: str, prefix: bytes) -> None:
        global _read
        entries = ts.ocdbt.dump(store, location).result()["entries"]
        _read += len(entries)
        for entry in entries:
            key = prefix + entry["key"]
            if "location" in entry:
                visit(entry["location"], key[: len(prefix) + entry["subtree_common_prefix_length"]])
            elif value := _VALUE.fullmatch(entry.get("indirect_value", "")):
                found.append((key.decode(), value[1] + value[2], int(value[3]), int(value[4])))

    newest = ts.ocdbt.dump(store).result()["versions"][-1]["root"]
    if "location" in newest:
        visit(newest["location"], b"")
    return found


def array_of(key: str, arrays: Collection[str]) -> str | None:
    """The array whose block a key names. The path of an array may itself look like a block."""
    while key not in arrays and key:
        key = key.rpartition("/")[0]
    return key or None


if __name__ == "__main__":
    print(json.dumps(_dumped(sys.argv[1])))
