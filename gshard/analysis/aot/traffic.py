"""What a compiled program sends, and how much of it overlaps with computation."""

from __future__ import annotations

from collections import defaultdict

from gshard.analysis.hlo import read_program


def traffic(text: str) -> dict[str, dict[str, int | None]]:
    """Bytes that one device sends in one step by the ring algorithms, by kind of collective.

    Returns:
      `wire_bytes`, and `asynchronous_bytes` of those collectives that overlap with computation.
      None where a collective lies in a loop whose length the program does not tell.
    """
    wire: dict[str, int | None] = defaultdict(int)
    overlapped: dict[str, int | None] = defaultdict(int)
    for collective in read_program(text).collectives:
        if collective.group_size > 1:
            moved = collective.wire_bytes
            _add(wire, collective.kind, moved)
            _add(overlapped, collective.kind, moved if collective.asynchronous else 0)
    return {"wire_bytes": dict(wire), "asynchronous_bytes": dict(overlapped)}


def _add(sums: dict[str, int | None], kind: str, amount: int | None) -> None:
    known = sums[kind]
    sums[kind] = None if known is None or amount is None else known + amount
