"""Signals to the launcher: noted, and passed on to the processes by whoever waits for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[list[int]]:
    """SIGTERM and SIGINT are listed as they come, instead of ending this program at once."""
    told: list[int] = []

    def hear(number: int, frame: object) -> None:
        told.append(number)

    before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
