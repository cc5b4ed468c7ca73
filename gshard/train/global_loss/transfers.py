"""What a loss of the global batch communicates, with the user's lines."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from gshard._util.jaxpr import COLLECTIVES, inner_jaxprs
from gshard._util.text import bytes_of, text_table
from gshard.train.global_loss.placement import size_in_bytes


@dataclass(frozen=True)
class Transfer:
    """A collective that the loss needs in its forward pass; its transpose follows in the backward.

    Attributes:
      kind: `gather` (examples of all devices), `sum` (of partial sums) or `extreme` (a maximum or
        minimum); over a sequence axis HLO's name of a collective, such as `collective-permute`.
      elements: of the full result, on one device.
      size: its bytes.
      times: how often, in loops.
      operation: the name of the operation that needs it.
      line: the user's file and line.
      axes: the mesh axes that it is over; empty for those of the examples on which nothing is kept.
      pairs: of a permute, who sends to whom, by their indices on the axis.
      at_least: whether it is in a loop of unknown length, of which one iteration is counted.
    """

    kind: str
    elements: int
    size: int
    times: int
    operation: str
    line: str
    axes: tuple[str, ...] = ()
    pairs: tuple[tuple[int, ...], ...] | None = None
    at_least: bool = False

    @classmethod
    def of(cls, aval: Any, kind: str, times: int, operation: str, line: str) -> Transfer:
        """Describes a collective whose full result has this shape and dtype."""
        return cls(kind, math.prod(aval.shape), size_in_bytes(aval), times, operation, line)


NEEDED_BY = re.compile(r"needed by ([\w.]+)(?: at (.*?:\d+))?")


def needed_by(operation: str, line: str) -> AbstractContextManager[Any]:
    """A named scope for the collectives that an operation of the loss needs."""
    where = line.rsplit("/", 1)[-1]
    return jax.named_scope(f"needed by {operation}" + (f" at {where}" if where else ""))


def transfers_over(
    axis: str, jaxpr: Any, times: int = 1, caller: tuple[str, str] = ("", "")
) -> list[Transfer]:
    """Returns the collectives over a mesh axis in a traced loss, of arrays as one device has them.

    A loop of unknown length counts once, and of branches the one that sends most. `caller` is the
    operation and the line that need what has no scope of `needed_by`.
    """
    found: Counter[Transfer] = Counter()  # times, which are 0 in the keys
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        scopes = NEEDED_BY.findall(str(eqn.source_info.name_stack))
        operation, line = scopes[-1] if scopes else caller
        if name in COLLECTIVES and axis in names_in(params):
            kind, operand, result = COLLECTIVES[name], eqn.invars[0].aval, eqn.outvars[0].aval
            # One side of a ragged all-to-all has room for the rows of all devices.
            chosen = min if name == "ragged_all_to_all" else max
            aval = chosen(operand, result, key=size_in_bytes)
            one = Transfer.of(aval, kind, 0, operation or name, line)
            pairs = tuple(map(tuple, params["perm"])) if name == "ppermute" else None
            found[dataclasses.replace(one, axes=names_in(params), pairs=pairs)] += times
        often = params["length"] if name == "scan" else 1
        place = operation, line
        inner = [transfers_over(axis, x, times * often, place) for x in inner_jaxprs(eqn)]
        if name == "cond":
            inner = [max(inner, key=lambda x: sum(t.size * t.times for t in x))]
        for transfer in (x for some in inner for x in some):
            at_least = transfer.at_least or name == "while"
            found[dataclasses.replace(transfer, times=0, at_least=at_least)] += transfer.times
    return [dataclasses.replace(one, times=times) for one, times in found.items()]


def names_in(params: dict[str, Any]) -> tuple[str, ...]:
    """Returns the mesh axes that a collective is over."""
    over = params.get("axes", params.get("axis_name", ()))
    return tuple(over) if isinstance(over, (tuple, list)) else (over,)


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
