"""Whether a compiled program keeps a promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gshard.analysis.audit_report import total

if TYPE_CHECKING:
    from gshard.analysis.audit import Row
    from gshard.sharding.budget import Promise

_OF_THE_USER = ("optimizer", "agree", "user")  # what an optimizer or a loss asks for itself


def exceeded(promise: Promise, rows: Iterable[Row]) -> tuple[str, ...]:
    """What moves more elements than was promised, in words; none where the promise holds.

    Nothing is promised of single numbers, nor of what an optimizer or a loss asks for itself. What
    the compiler put in was not promised either, and is named.
    """
    found: dict[tuple[str, str], list[int | None]] = {}
    for row in rows:
        if not row.scalar and row.purpose not in _OF_THE_USER:
            found.setdefault((row.kind, row.purpose), []).append(row.elements)
    bounds: dict[tuple[str, str], int] = {}
    for moved in promise.moved:
        key = (moved.kind, moved.purpose)
        bounds[key] = bounds.get(key, 0) + moved.elements
    said = []
    for key, amounts in found.items():
        bound, amount = bounds.get(key, 0), total(amounts)
        if amount is None or amount > bound:
            many = "an unknown number" if amount is None else f"{amount:,}"
            said.append(f"{key[0]} for {key[1]}: promised {bound:,} elements, found {many}")
    return tuple(said)
