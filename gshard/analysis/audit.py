"""`audit` compares what a compiled step communicates with its budget, and reads its memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from rich.table import Table

from gshard._util.errors import GShardError
from gshard._util.html import html_of
from gshard._util.text import bytes_of, text_of, text_table
from gshard.analysis.hlo import Array, Collective, read_program
from gshard.sharding.budget import Budget, Traffic
from gshard.sharding.plan import Plan
from gshard.train.global_loss.transfers import Transfer, transfers_table

_SCOPE = re.compile(r"\bgshard/(\w+)")
# A user's own collective: the name of its primitive is the end of its name stack.
_WRITTEN = re.compile(
    r"/(psum|psum_invariant|pmax|pmin|all_gather|reduce_scatter|all_to_all|ppermute)$"
)
_NO_BUDGET = ("optimizer", "agree", "user", "loss")  # what an optimizer or a loss asks for itself
_USES = ("argument", "output", "alias", "temp")
_MEMORY = {use: f"{use}_size_in_bytes" for use in (*_USES, *(f"host_{use}" for use in _USES))}
_MEMORY["peak"] = "peak_memory_in_bytes"


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
        Others': `user` (the user's own function, such as a synchronised BatchNorm), `optimizer`
        (norms, factored moments and matrix products of the user's optimizer) and `compiler` (what
        else XLA inserted).
      scalar: whether all operands have one element, or are a few scalars in one vector.
      count: number of collectives in the program's text.
      asynchronous: how many of these overlap with computation.
      conditional: whether some are in a branch that not every run takes.
      times: executions per run. None if the length of a loop is unknown; then the next three are
        None, too.
      elements: payload per device and run: outputs of all-gathers, inputs of all others.
      payload_bytes: the payload in bytes.
      wire_bytes: bytes that one device sends per run, by the ring algorithms.
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
    """The communication and memory of a compiled program; print it for a report.

    Attributes:
      collectives: one row for each kind, axes, dtype and purpose, with scalars in separate rows.
      memory: bytes on one device by use: `argument`, `output`, `alias` (outputs in the memory of
        donated arguments), `temp`, `peak`, and `host_*`. Uses that the backend does not report are
        missing.
      budget: the budget of the step's plan; None if the audited function has none.
      loss_transfers: what the loss needs of other devices' examples, with the user's lines, as
        `step.loss_transfers`.

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

    def elements(self, kind: str, scalars: bool = False) -> int:
        """Elements that collectives of one kind communicate, per device and run.

        Args:
          kind: such as `all-gather`.
          scalars: whether to count losses, norms and other scalars.

        Raises:
          GShardError: one of them is in a loop whose length is unknown.
        """
        rows = (r for r in self.collectives if r.kind == kind and (scalars or not r.scalar))
        return sum(_known(row, row.elements) for row in rows)

    def wire_bytes(self, kind: str | None = None) -> int:
        """Bytes that one device sends in one run, in collectives of one kind or of all kinds.

        Raises:
          GShardError: one of them is in a loop whose length is unknown.
        """
        rows = (row for row in self.collectives if kind in (None, row.kind))
        return sum(_known(row, row.wire_bytes) for row in rows)

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Readable messages of what is over budget; empty if nothing is, or without a budget."""
        return () if self.budget is None else tuple(_over_budget(self.budget, self.collectives))

    def as_dict(self) -> dict[str, Any]:
        """The whole audit as dicts, tuples, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return audit_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `print(audit)`."""
        return html_of(_report(self))


def audit(step: Any, *args: Any, plan: Plan | None = None, budget: Budget | None = None) -> Audit:
    """Compiles a step for these arguments, and reads what it communicates and keeps in memory.

    Nothing is executed and no argument is donated. Collectives of a single device transfer nothing,
    and are left out.

    Args:
      step: a step of `make_train_step`, or any jitted function (`jax.jit`, `nnx.jit`).
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
      plan: the plan of a jitted function, for the names of the mesh axes; by default the mesh of
        its inputs gives them.
      budget: the budget of a jitted function, `gshard.budget(plan, ...)`, for the comparison.

    Returns:
      What the compiled program communicates and keeps; print it for a report.

    Raises:
      GShardError: `step` cannot be lowered, or the backend has no text of its programs.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "p_g_os", min_shard_size=0
      ... )
      >>> found = gshard.audit(gshard.make_train_step(loss_fn, plan), state, batch)
      >>> "Collectives, per device and run" in str(found)
      True
    """
    if not callable(getattr(step, "lower", None)):
        raise GShardError(
            f"step is {type(step).__name__!r} and has no .lower(); pass what make_train_step "
            "returns, or wrap the function in jax.jit or nnx.jit"
        )
    compiled = step.lower(*args).compile()
    text = compiled.as_text()
    if text is None:
        raise GShardError(
            "the backend gives no text of its compiled programs; audit cannot read it"
        )
    plan = getattr(step, "plan", None) if plan is None else plan
    budget = getattr(step, "budget", None) if budget is None else budget
    mesh = _mesh_of(compiled, args) if plan is None else plan.mesh
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""
    memory = compiled_memory(compiled, platform)
    transfers = getattr(step, "loss_transfers", None) or ()
    return Audit(collective_rows(text, mesh), memory, budget, transfers)


def _mesh_of(compiled: Any, args: Any) -> Mesh | AbstractMesh | None:
    """Returns the largest mesh of the inputs."""
    shardings = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
    shardings += [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def compiled_memory(compiled: Any, platform: str = "") -> dict[str, int]:
    """Returns the bytes of a compiled program on one device by use, as in `Audit.memory`.

    Without the peak if the platform is "cpu", since that of XLA:CPU leaves out temporaries (JAX
    0.10), and for programs from the compilation cache, for which JAX reports 0 (JAX 0.11, GPU).
    """
    stats = compiled.memory_analysis()
    fields = {name: field for name, field in _MEMORY.items() if hasattr(stats, field)}
    found = {name: getattr(stats, field) for name, field in fields.items()}
    if platform == "cpu" or not found.get("peak"):
        found.pop("peak", None)
    return found


def collective_rows(text: str, mesh: Mesh | AbstractMesh | None) -> tuple[CollectiveRow, ...]:
    """Returns the collectives in the text of optimized HLO, as in `Audit.collectives`."""
    grouped: dict[tuple[Any, ...], list[Collective]] = {}
    for combined in read_program(text).collectives:
        if combined.group_size == 1:
            continue
        # XLA combines collectives of several purposes, such as those of a loss and gradients.
        apart: dict[tuple[Any, ...], list[Array]] = {}
        axes = _axes(combined, mesh)
        for array, op_name in zip(combined.operands, combined.op_names, strict=True):
            purpose = _purpose(combined.kind, op_name)
            key = (
                _kind(combined.kind, purpose),
                axes,
                array.dtype,
                purpose,
                purpose == "scalar" or array.elements == 1,
            )
            apart.setdefault(key, []).append(array)
        for key, arrays in apart.items():
            one = dataclasses.replace(combined, operands=tuple(arrays))
            grouped.setdefault(key, []).append(one)
    rows = [
        CollectiveRow(
            *key,
            count=len(members),
            asynchronous=sum(x.asynchronous for x in members),
            conditional=any(x.conditional for x in members),
            times=sum_known(x.times for x in members),
            elements=sum_known(x.times and x.times * x.elements for x in members),
            payload_bytes=sum_known(x.times and x.times * x.payload_bytes for x in members),
            wire_bytes=sum_known(x.wire_bytes for x in members),
        )
        for key, members in grouped.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.scalar, -(row.wire_bytes or 0))))


def _axes(collective: Collective, mesh: Mesh | AbstractMesh | None) -> tuple[str, ...] | None:
    """Returns the smallest set of mesh axes that has the collective's groups of devices.

    HLO numbers devices in the flat order of the mesh, whatever the devices' own ids are.
    """
    if mesh is None or collective.kind == "send":
        return None
    names, sizes = mesh.axis_names, mesh.axis_sizes
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if collective.groups is None:
        return tuple(names[i] for i in wide)
    groups = {frozenset(group) for group in collective.groups}
    ids = np.arange(mesh.size).reshape(sizes)
    subsets = (itertools.combinations(wide, many) for many in range(len(wide) + 1))
    for chosen in itertools.chain.from_iterable(subsets):
        members = math.prod(sizes[i] for i in chosen)
        rows = np.moveaxis(ids, chosen, range(-len(chosen), 0)).reshape(-1, members)
        if {frozenset(row) for row in rows.tolist()} == groups:
            return tuple(names[i] for i in chosen)
    return None


def _purpose(kind: str, op_name: str) -> str:
    """Returns the innermost `gshard/...` scope of a name stack.

    Differentiation keeps the scope of what it transposes, and the transpose of a gather is a
    scatter: the primitive, or what a reduction kept of it, tells them apart.
    """
    scopes: list[str] = _SCOPE.findall(op_name)
    purpose = scopes[-1] if scopes else "user" if _WRITTEN.search(op_name) else "compiler"
    summed = kind == "reduce-scatter" or op_name.endswith(("/reduce_scatter", "/add"))
    if purpose == "gather" and summed:
        return "scatter"
    if purpose == "scatter" and kind == "all-gather":
        return "gather"
    return purpose


def _kind(kind: str, purpose: str) -> str:
    """Over Gloo a reduce-scatter may be an all-to-all of as many elements, and a sum."""
    return "reduce-scatter" if (kind, purpose) == ("all-to-all", "scatter") else kind


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
    """Yields (kind, purpose), its traffic in the budget, and the elements found; no scalars."""
    rows = [row for row in rows if not row.scalar]
    for key in dict.fromkeys((x.kind, x.purpose) for x in (*budget.communicated, *rows)):
        traffic = [x for x in budget.communicated if (x.kind, x.purpose) == key]
        yield key, traffic, sum_known(x.elements for x in rows if (x.kind, x.purpose) == key)


def _over_budget(budget: Budget, rows: Iterable[CollectiveRow]) -> Iterator[str]:
    """Yields a message for each kind of collective that transfers more than its budget.

    Scalars have no budget, and neither has what an optimizer or a loss asks for itself. Collectives
    that the compiler inserted have a budget of 0.
    """
    for (kind, purpose), traffic, amount in _compared(budget, rows):
        bound = sum(x.elements for x in traffic)
        if purpose not in _NO_BUDGET and (amount is None or amount > bound):
            many = "an unknown number" if amount is None else f"{amount:,}"
            yield f"{kind} for {purpose}: the budget is {bound:,} elements, found {many}"


def audit_text(found: Audit) -> str:
    """Returns tables of the collectives, the budget and findings, and one device's memory."""
    return text_of(_report(found))


def _report(found: Audit) -> list[Table]:
    parts = [_collectives_table(found.collectives)]
    if found.budget is not None:
        parts.append(_budget_table(found.budget, found.collectives))
    if found.loss_transfers:
        parts.append(transfers_table(found.loss_transfers))
    return [*parts, _memory_table(found)]


def sum_known(amounts: Iterable[int | None]) -> int | None:
    """Returns the sum, or None if one of the amounts is unknown."""
    total = 0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


def _collectives_table(rows: Iterable[CollectiveRow]) -> Table:
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
            *("?" if n is None else bytes_of(n) for n in (row.payload_bytes, row.wire_bytes)),
        )
    return table


def _budget_table(budget: Budget, rows: Iterable[CollectiveRow]) -> Table:
    table = text_table(
        "Elements communicated: budget and found", ("kind", "for"), ("budget", "found")
    )
    for key, traffic, amount in _compared(budget, rows):
        mark = "<= " if any(x.at_most for x in traffic) else ""
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
