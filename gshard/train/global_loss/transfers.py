"""What a loss of the global batch communicates, with the user's lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from gshard._util.text import bytes_of, text_table


@dataclass(frozen=True)
class Transfer:
    """A collective that the loss needs in its forward pass; its transpose follows in the backward.

    Attributes:
      kind: `gather` (examples of all devices), `sum` (of partial sums) or `extreme` (a maximum or
        minimum).
      size: bytes of the full result.
      times: how often, in loops.
      operation: the name of the operation that needs it.
      line: the user's file and line.
    """

    kind: str
    size: int
    times: int
    operation: str
    line: str


def transfers_table(transfers: Iterable[Transfer]) -> Table:
    """Returns a table of what the loss communicates, the largest first."""
    table = text_table(
        "Collectives of the loss, in its forward pass",
        ("kind", "operation", "line"),
        ("times", "bytes"),
    )
    for x in sorted(transfers, key=lambda x: -x.size * x.times):
        table.add_row(x.kind, x.operation, x.line, f"{x.times:,}", bytes_of(x.size * x.times))
    return table
