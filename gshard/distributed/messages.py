"""The lines that `places` sends: JSON objects, in which sets of ranks are short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def line_of(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


def send(writer: asyncio.StreamWriter, line: bytes) -> None:
    """Sends a line, or nothing to a process that has left."""
    with suppress(OSError, RuntimeError):
        writer.write(line)


def packed(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as ranges: first, number and stride. Most sets of ranks are one or two."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and (found[-1][1] == 1 or rank == found[-1][0] + found[-1][1] * found[-1][2]):
            first, count, stride = found[-1]
            found[-1] = [first, count + 1, stride if count > 1 else rank - first]
        else:
            found.append([rank, 1, 1])
    return found


def unpacked(ranges: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of ranges."""
    return [x + i * stride for x, count, stride in ranges for i in range(count)]
