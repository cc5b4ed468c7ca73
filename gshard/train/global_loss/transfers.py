"""What a loss of the global batch communicates, with the user's lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gshard._util.text import bytes_of, text_table
from gshard.train.global_loss.placement import size_in_bytes


@dataclass(frozen=True)
class Transfer:
    """A collective that the loss needs in its forward pass; its transpose follows in the backward.

    Attributes:
      kind: `gather` (examples of all devices), `sum` (of partial sums) or `extreme` (a maximum or
        minimum).
      elements: of the full result.
      size: its bytes.
      times: how often, in loops.
      operation: the name of the operation that needs it.
      line: the user's file and line.
    """

    kind: str
    elements: int
    size: int
    times: int
    operation: str
    line: str

    @classmethod
    def of(cls, aval: Any, kind: str, times: int, operation: str, line: str) -> Transfer:
        """Describes a collective whose full result has this shape and dtype."""
        return cls(kind, math.prod(aval.shape), size_in_bytes(aval), times, operation, line)


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
