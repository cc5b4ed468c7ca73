"""An audit as text: tables of fixed width, the same in a terminal, a log and a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from gshard._util.units import bytes_of

if TYPE_CHECKING:
    from gshard.analysis.audit import Audit, Row
    from gshard.sharding.budget import Movement, Promise

_WIDTH = 160


def report(found: Audit) -> str:
    """The collectives, what was promised beside what was found, and the memory of one device."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None, markup=False, emoji=False)
    console.print(_collectives_table(found.collectives))
    if found.promise is not None:
        console.print(_promise_table(found.promise, found.collectives))
    console.print(_memory_table(found))
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def total(amounts: Iterable[int | None]) -> int | None:
    """The sum; None when one of them is not known."""
    listed = list(amounts)
    known = [amount for amount in listed if amount is not None]
    return sum(known) if len(known) == len(listed) else None


def _collectives_table(rows: tuple[Row, ...]) -> Table:
    table = _table("Collectives, per device and run")
    for name in ("kind", "axes", "dtype", "for"):
        table.add_column(name)
    for name in ("count", "async", "times", "elements", "payload", "wire"):
        table.add_column(name, justify="right")
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


def _promise_table(promise: Promise, rows: tuple[Row, ...]) -> Table:
    table = _table("Elements moved: promised and found")
    for name in ("kind", "for"):
        table.add_column(name)
    for name in ("promised", "found"):
        table.add_column(name, justify="right")
    rows = tuple(row for row in rows if not row.scalar)
    promised: dict[tuple[str, str], list[Movement]] = {}
    for movement in promise.moved:
        promised.setdefault((movement.kind, movement.purpose), []).append(movement)
    for key in dict.fromkeys([*promised, *((row.kind, row.purpose) for row in rows)]):
        movements = promised.get(key, [])
        mark = "<= " if any(movement.at_most for movement in movements) else ""
        table.add_row(
            *key,
            f"{mark}{sum(m.elements for m in movements):,}" if movements else "-",
            _number(total(row.elements for row in rows if (row.kind, row.purpose) == key)),
        )
    return table


def _memory_table(found: Audit) -> Table:
    table = _table("Memory of one device")
    table.add_column("use")
    for name in ("bytes", "size"):
        table.add_column(name, justify="right")
    resident = {} if found.promise is None else found.promise.resident
    for name, amount in resident.items():
        table.add_row(f"promised: {name}", f"{amount:,}", _size(amount))
    on_host = {} if found.promise is None else found.promise.host
    for name, amount in on_host.items():
        if amount:
            table.add_row(f"promised: {name} on host", f"{amount:,}", _size(amount))
    for name, amount in found.memory.items():
        if amount or not name.startswith("host_"):
            table.add_row(name.replace("_", " "), f"{amount:,}", _size(amount))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)


def _number(amount: int | None) -> str:
    return "?" if amount is None else f"{amount:,}"


def _size(amount: int | None) -> str:
    return "?" if amount is None else bytes_of(amount)
