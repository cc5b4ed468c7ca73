"""An audit: what a compiled step communicates and keeps in memory, next to its budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gshard._util.errors import GShardError
from gshard._util.html import html_of
from gshard._util.text import bytes_of, text_of, text_table
from gshard.sharding.budget import Budget, Traffic, products_table
from gshard.sharding.nodes import check_kind
from gshard.train.global_loss.transfers import Transfer, transfers_table

_NO_BUDGET = ("optimizer", "agree", "user")  # what others than gshard ask for


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over the same mesh axes, of one dtype and for one purpose.

    Attributes:
      kind: such as `reduce-scatter`.
      axes: mesh axes that communicate; None if no set of axes has these groups of devices.
      dtype: XLA's name. XLA:CPU communicates bf16 as f32.
      purpose: what it is for. gshard's own: `gather` (parameters), `scatter` and `reduce`
        (gradients), `update` (all-gather of the updated parameters), `non_trainable` (all-gather of
        what is not trained), `agree` (state that the loss returns, fp8 statistics), `loss` (what a
        loss needs of other devices' examples) and `scalar`.
        Not gshard's: `user` (the user's own function, such as a synchronized BatchNorm, and what
        XLA adds over the user's model-parallel axes), `optimizer` (norms, factored moments and
        matrix products of the user's optimizer) and `compiler` (what else XLA added).
      scalar: whether it transfers a loss, a norm or a few of them, and nothing of an array.
      count: number of collectives in the program's text.
      asynchronous: how many of these overlap with computation.
      conditional: whether some are in a branch that not every run takes.
      times: executions per run. None if the length of a loop is unknown; then the amounts are
        None, too.
      elements: payload per device and run: outputs of all-gathers, inputs of all others.
      payload_bytes: the payload in bytes.
      wire_bytes: bytes that one device sends per run, by the ring algorithms.
      network_bytes: how many of these go to other nodes: the mean over the devices of a node.
      backward: of purpose `loss`, whether it is of a derivative, or of what a backward pass
        computes again. The budget has the rest, the forward pass.
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
    network_bytes: int | None = 0
    backward: bool = False


@dataclass(frozen=True)
class Audit:
    """The communication and memory of a compiled program; print it for a report.

    Attributes:
      collectives: one row for each kind, axes, dtype and purpose, with scalars in separate rows.
      memory: bytes on one device by use: `argument`, `output`, `alias` (outputs in the memory of
        donated arguments), `temp`, `peak`, and `host_*`. Uses that the backend does not report are
        missing.
      budget: the budget of the step's plan; None if the audited function has none.
      loss_transfers: what the loss needs of other devices' examples, with the user's lines, as
        `step.loss_transfers`.
      nodes: number of nodes, whose devices share fast links (NVLink, or those of a TPU slice).
      flops: FLOP of all matrix products and convolutions in one run, on one device. None if one is
        in a loop whose length is unknown.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero1", min_shard_size=0
      ... )
      >>> found = gshard.audit(gshard.make_train_step(loss_fn, plan), state, batch)
      >>> found.elements("all-gather") == found.budget.elements("all-gather") == 64 * 32 + 32
      True
      >>> found.exceeded  # nothing is over budget
      ()
    """

    collectives: tuple[CollectiveRow, ...]
    memory: dict[str, int]
    budget: Budget | None
    loss_transfers: tuple[Transfer, ...] = ()
    nodes: int = 1
    flops: int | None = 0

    def elements(self, kind: str, scalars: bool = False) -> int:
        """Elements that collectives of one kind communicate, per device and run.

        Args:
          kind: such as `all-gather`.
          scalars: whether to count losses, norms and other scalars.

        Raises:
          GShardError: one of them is in a loop whose length is unknown, or there is no such kind.
        """
        rows = (row for row in self._of(kind) if scalars or not row.scalar)
        return sum(_known(row, row.elements) for row in rows)

    def wire_bytes(self, kind: str | None = None) -> int:
        """Bytes that one device sends in one run, in collectives of one kind or of all kinds.

        Raises:
          GShardError: one of them is in a loop whose length is unknown, or there is no such kind.
        """
        return sum(_known(row, row.wire_bytes) for row in self._of(kind))

    def network_bytes(self, kind: str | None = None) -> int:
        """Bytes that one device sends to other nodes in one run: the mean over a node's devices.

        Raises:
          GShardError: one of them is in a loop whose length is unknown, or there is no such kind.
        """
        return sum(_known(row, row.network_bytes) for row in self._of(kind))

    def _of(self, kind: str | None) -> list[CollectiveRow]:
        """Returns the collectives of one kind, or all of them."""
        if kind is not None:
            check_kind(kind)
        return [row for row in self.collectives if kind in (None, row.kind)]

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Readable messages of what is over budget; empty if nothing is, or without a budget."""
        return () if self.budget is None else tuple(_over_budget(self.budget, self.collectives))

    def as_dict(self) -> dict[str, Any]:
        """The whole audit as dicts, tuples, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return text_of(_report(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `print(audit)`."""
        return html_of(_report(self))


def sum_known(amounts: Iterable[int | None]) -> int | None:
    """Returns the sum, or None if one of the amounts is unknown."""
    total = 0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


def _known(row: CollectiveRow, amount: int | None) -> int:
    if amount is None:
        raise GShardError(
            f"{row.kind} ({row.purpose}) runs in a loop whose length is not constant, so what it "
            "communicates is unknown; audit the loop's body, or give the loop a constant length "
            "(lax.scan, lax.fori_loop)"
        )
    return amount


def _compared(
    budget: Budget, rows: Iterable[CollectiveRow]
) -> Iterator[tuple[tuple[str, str], list[Traffic], int | None]]:
    """Yields (kind, purpose), its traffic in the budget, and the elements found.

    Without scalars, and without the backward pass of a loss.
    """
    rows = [row for row in rows if not row.scalar and not row.backward]
    for key in dict.fromkeys((x.kind, x.purpose) for x in (*budget.communicated, *rows)):
        traffic = [x for x in budget.communicated if (x.kind, x.purpose) == key]
        yield key, traffic, sum_known(x.elements for x in rows if (x.kind, x.purpose) == key)


def _over_budget(budget: Budget, rows: Iterable[CollectiveRow]) -> Iterator[str]:
    """Yields a message for each kind of collective that transfers more than its budget.

    Scalars have no budget, and neither has what an optimizer or a user's function asks for itself.
    Collectives that the compiler inserted have a budget of 0. A loss has one for kinds that its
    forward pass was traced with, but for those in branches and in loops of unknown length. Its
    all-reduces are not compared: a maximum also sends where it is NaN, and how many entries tie.
    """
    rows = list(rows)
    unsure = {x.kind for x in rows if x.purpose == "loss" and (x.conditional or x.times is None)}
    unsure |= {"all-reduce", *(x.kind for x in budget.communicated if x.at_least)}
    for (kind, purpose), traffic, amount in _compared(budget, rows):
        if purpose == "loss" and (not traffic or kind in unsure):
            continue
        bound = sum(x.elements for x in traffic)
        if purpose not in _NO_BUDGET and (amount is None or amount > bound):
            many = "an unknown number" if amount is None else f"{amount:,}"
            yield f"{kind} for {purpose}: the budget is {bound:,} elements, found {many}"
        # A quantized array that is sent as it is has no more elements than codes and scales.
        codes = sum(x.codes for x in traffic)
        plain = _floats(x for x in rows if (x.kind, x.purpose, x.scalar) == (kind, purpose, False))
        if codes and plain is not None and plain > bound - codes:
            yield (
                f"{kind} for {purpose}: the budget of what is not quantized is {bound - codes:,} "
                f"elements, found {plain:,}"
            )


def _floats(rows: Iterable[CollectiveRow]) -> int | None:
    """Sums the elements that are sent as floating-point numbers over the axes of codes, if any.

    Over model-parallel axes XLA itself gathers what is decoded.
    """
    floats, codes = list[CollectiveRow](), list[CollectiveRow]()
    for row in rows:
        (floats if row.dtype.startswith(("f", "bf")) else codes).append(row)
    axes = {axis for x in codes for axis in x.axes or (None,)}  # None: of sub-groups
    over = [x for x in floats if not axes or axes & {*(x.axes or (None,))}]
    return sum_known(x.elements for x in over)


def _report(found: Audit) -> list[Table]:
    """Returns tables of the collectives, the budget and findings, and one device's memory."""
    parts = [_collectives_table(found.collectives, found.nodes)]
    if found.budget is not None:
        parts.append(_budget_table(found.budget, found.collectives))
    if found.loss_transfers:
        parts.append(transfers_table(found.loss_transfers))
    if found.budget is not None:
        parts += products_table(found.budget.products, found.flops)
    return [*parts, _memory_table(found)]


def _collectives_table(rows: Iterable[CollectiveRow], nodes: int) -> Table:
    several = nodes > 1
    table = text_table(
        f"Collectives, per device and run{f', over {nodes} nodes' if several else ''}",
        ("kind", "axes", "dtype", "for"),
        ("count", "async", "times", "elements", "payload", "wire", *(("between nodes",) * several)),
    )
    for row in rows:
        sizes = (row.payload_bytes, row.wire_bytes, *((row.network_bytes,) * several))
        table.add_row(
            row.kind,
            "?" if row.axes is None else ",".join(row.axes),
            row.dtype,
            row.purpose
            + (" (scalar)" if row.scalar and row.purpose != "scalar" else "")
            + (" (backward)" if row.backward else ""),
            f"{row.count:,}",
            f"{row.asynchronous:,}",
            ("<= " if row.conditional else "") + _number(row.times),
            _number(row.elements),
            *("?" if n is None else bytes_of(n) for n in sizes),
        )
    return table


def _budget_table(budget: Budget, rows: Iterable[CollectiveRow]) -> Table:
    table = text_table(
        "Elements communicated: budget and found", ("kind", "for"), ("budget", "found")
    )
    for key, traffic, amount in _compared(budget, rows):
        mark = "<= " if any(x.at_most for x in traffic) else ""
        mark = ">= " if any(x.at_least for x in traffic) else mark
        bound = f"{mark}{sum(x.elements for x in traffic):,}" if traffic else "-"
        table.add_row(*key, bound, _number(amount))
    return table


def _memory_table(found: Audit) -> Table:
    amounts: dict[str, int] = {}
    if found.budget is not None:
        amounts |= {f"budget: {name}": n for name, n in found.budget.resident.items()}
        amounts |= {f"budget: {name} on host": n for name, n in found.budget.host.items() if n}
    for name, n in found.memory.items():
        if n or not name.startswith("host_"):
            amounts[name.replace("_", " ")] = n
    rows = [(name, f"{n:,}", bytes_of(n)) for name, n in amounts.items()]
    return text_table("Memory of one device", ("use",), ("bytes", "size"), rows)


def _number(amount: int | None) -> str:
    return "?" if amount is None else f"{amount:,}"
