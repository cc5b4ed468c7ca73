"""An audit as text: tables of fixed width, the same in a terminal, a log and a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from gshard._util.errors import GShardError
from gshard._util.tables import text_of, text_table
from gshard._util.units import bytes_of

if TYPE_CHECKING:
    from gshard.sharding.budget import Budget, Traffic


_OF_THE_USER = ("optimizer", "agree", "user")  # what an optimizer or a loss asks for itself


@dataclass(frozen=True)
class Row:
    """Collectives of one kind over one group, for one purpose.

    Attributes:
      kind: such as `reduce-scatter`.
      axes: the mesh axes that communicate; None when no set of axes makes these groups.
      dtype: XLA's name. On CPU XLA moves bf16 as f32.
      purpose: `gather`, `scatter`, `publish`, `reduce`, `extras` (what is not trained, made whole),
        `agree` (what the loss returns anew, fp8 statistics), `scalar`: what gshard wrote it for;
        `user` for what the user's own function communicates, such as a synchronised BatchNorm;
        `optimizer` for what the user's optimizer must communicate (norms, factored moments,
        matrices that it multiplies), whoever wrote it; `compiler` for what else XLA put in.
      scalar: all operands have one element.
      count: collectives in the program's text.
      asynchronous: how many of them overlap with computation.
      conditional: whether some lie in a branch that not every run takes.
      times: executions per run; None, as in the next three, when a loop's length is not known.
      elements: payload per device and run: outputs of all-gathers, inputs of everything else.
      payload_bytes: the same in bytes.
      wire_bytes: bytes that a device sends per run, by the ring algorithms.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    purpose: str
    scalar: bool
    count: int
    asynchronous: int
    conditional: bool
    times: int | None
    elements: int | None
    payload_bytes: int | None
    wire_bytes: int | None


@dataclass(frozen=True)
class Audit:
    """A compiled program's communication and memory.

    Attributes:
      collectives: one row per kind, axes, dtype and purpose, scalars apart.
      memory: bytes on one device by use: `argument`, `output`, `alias` (outputs in the memory of
        donated arguments), `temp`, `peak`, and `host_*`. What the backend does not report is
        missing.
      promise: what the plan promised; None when the audited function has none.
    """

    collectives: tuple[Row, ...]
    memory: dict[str, int]
    budget: Budget | None

    def elements(self, kind: str, scalars: bool = False) -> int:
        """Elements that collectives of one kind move on a device in one run.

        Args:
          kind: such as `all-gather`.
          scalars: whether losses, norms and other single numbers count.

        Raises:
          GShardError: one of them lies in a loop whose length the program does not tell.
        """
        rows = (r for r in self.collectives if r.kind == kind and (scalars or not r.scalar))
        return sum(_known(row, row.elements) for row in rows)

    def wire_bytes(self, kind: str | None = None) -> int:
        """Bytes that a device sends in one run, of one kind or of all.

        Raises:
          GShardError: as `elements`.
        """
        rows = (row for row in self.collectives if kind in (None, row.kind))
        return sum(_known(row, row.wire_bytes) for row in rows)

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Promises that do not hold, in words; none where there is no promise."""
        return () if self.budget is None else exceeded(self.budget, self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """The whole audit in dicts, lists, strings and numbers, ready for JSON."""
        return {
            "collectives": [
                row | {"axes": None if row["axes"] is None else list(row["axes"])}
                for row in map(dataclasses.asdict, self.collectives)
            ],
            "memory": dict(self.memory),
            "budget": None if self.budget is None else _budget_dict(self.budget),
        }

    def __str__(self) -> str:
        return report(self)


def _known(row: Row, amount: int | None) -> int:
    if amount is None:
        raise GShardError(
            f"{row.kind} ({row.purpose}) runs in a loop whose length is not constant, so what it "
            "moves is not known; audit the loop's body, or fix its length (lax.scan, fori_loop)"
        )
    return amount


def _budget_dict(budget: Budget) -> dict[str, Any]:
    return dataclasses.asdict(budget) | {
        "communicated": [dataclasses.asdict(m) for m in budget.communicated]
    }


def exceeded(budget: Budget, rows: Iterable[Row]) -> tuple[str, ...]:
    """What moves more elements than was promised, in words; none where the promise holds.

    Nothing is promised of single numbers, nor of what an optimizer or a loss asks for itself. What
    the compiler put in was not promised either, and is named.
    """
    found: dict[tuple[str, str], list[int | None]] = {}
    for row in rows:
        if not row.scalar and row.purpose not in _OF_THE_USER:
            found.setdefault((row.kind, row.purpose), []).append(row.elements)
    bounds: dict[tuple[str, str], int] = {}
    for moved in budget.communicated:
        key = (moved.kind, moved.purpose)
        bounds[key] = bounds.get(key, 0) + moved.elements
    said = []
    for key, amounts in found.items():
        bound, amount = bounds.get(key, 0), total(amounts)
        if amount is None or amount > bound:
            many = "an unknown number" if amount is None else f"{amount:,}"
            said.append(f"{key[0]} for {key[1]}: promised {bound:,} elements, found {many}")
    return tuple(said)


def report(found: Audit) -> str:
    """The collectives, what was promised beside what was found, and the memory of one device."""
    parts = [_collectives_table(found.collectives)]
    if found.budget is not None:
        parts.append(_budget_table(found.budget, found.collectives))
    return text_of([*parts, _memory_table(found)])


def total(amounts: Iterable[int | None]) -> int | None:
    """The sum; None when one of them is not known."""
    listed = list(amounts)
    known = [amount for amount in listed if amount is not None]
    return sum(known) if len(known) == len(listed) else None


def _collectives_table(rows: tuple[Row, ...]) -> Table:
    table = text_table(
        "Collectives, per device and run",
        ("kind", "axes", "dtype", "for"),
        ("count", "async", "times", "elements", "payload", "wire"),
    )
    for row in rows:
        table.add_row(
            row.kind,
            "?" if row.axes is None else ",".join(row.axes),
            row.dtype,
            row.purpose + (" (scalar)" if row.scalar and row.purpose != "scalar" else ""),
            f"{row.count:,}",
            f"{row.asynchronous:,}",
            ("<= " if row.conditional else "") + _number(row.times),
            _number(row.elements),
            _size(row.payload_bytes),
            _size(row.wire_bytes),
        )
    return table


def _budget_table(budget: Budget, rows: tuple[Row, ...]) -> Table:
    title = "Elements moved: promised and found"
    table = text_table(title, ("kind", "for"), ("promised", "found"))
    rows = tuple(row for row in rows if not row.scalar)
    budgeted: dict[tuple[str, str], list[Traffic]] = {}
    for movement in budget.communicated:
        budgeted.setdefault((movement.kind, movement.purpose), []).append(movement)
    for key in dict.fromkeys([*budgeted, *((row.kind, row.purpose) for row in rows)]):
        movements = budgeted.get(key, [])
        mark = "<= " if any(movement.at_most for movement in movements) else ""
        table.add_row(
            *key,
            f"{mark}{sum(m.elements for m in movements):,}" if movements else "-",
            _number(total(row.elements for row in rows if (row.kind, row.purpose) == key)),
        )
    return table


def _memory_table(found: Audit) -> Table:
    table = text_table("Memory of one device", ("use",), ("bytes", "size"))
    resident = {} if found.budget is None else found.budget.resident
    for name, amount in resident.items():
        table.add_row(f"promised: {name}", f"{amount:,}", _size(amount))
    on_host = {} if found.budget is None else found.budget.host
    for name, amount in on_host.items():
        if amount:
            table.add_row(f"promised: {name} on host", f"{amount:,}", _size(amount))
    for name, amount in found.memory.items():
        if amount or not name.startswith("host_"):
            table.add_row(name.replace("_", " "), f"{amount:,}", _size(amount))
    return table


def _number(amount: int | None) -> str:
    return "?" if amount is None else f"{amount:,}"


def _size(amount: int | None) -> str:
    return "?" if amount is None else bytes_of(amount)
