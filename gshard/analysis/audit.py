"""What a compiled step really communicates and keeps, beside what the plan promised."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError
from gshard.analysis.audit_report import report, total
from gshard.analysis.hlo import Array, Collective, read_program

if TYPE_CHECKING:
    from gshard.sharding.budget import Promise
    from gshard.sharding.plan import Plan

_SCOPE = re.compile(r"\bgshard/(\w+)")
# A collective that somebody wrote: its primitive ends the name.
_WRITTEN = re.compile(
    r"/(psum|psum_invariant|pmax|pmin|all_gather|reduce_scatter|all_to_all|ppermute)$"
)
_USES = ("argument", "output", "alias", "temp")
_MEMORY = {use: f"{use}_size_in_bytes" for use in (*_USES, *(f"host_{use}" for use in _USES))}
_MEMORY["peak"] = "peak_memory_in_bytes"


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
    promise: Promise | None

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
        return () if self.promise is None else exceeded(self.promise, self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """The whole audit in dicts, lists, strings and numbers, ready for JSON."""
        return {
            "collectives": [
                row | {"axes": None if row["axes"] is None else list(row["axes"])}
                for row in map(dataclasses.asdict, self.collectives)
            ],
            "memory": dict(self.memory),
            "promise": None if self.promise is None else _promise_dict(self.promise),
        }

    def __str__(self) -> str:
        return report(self)


def audit(step: Any, *args: Any, plan: Plan | None = None, promise: Promise | None = None) -> Audit:
    """Compiles a step for these arguments and reads what it communicates and keeps.

    Nothing is executed and no argument is donated. Collectives among one device are left out, they
    move nothing.

    Args:
      step: what `make_train_step` returns, or any jitted function (`jax.jit`, `nnx.jit`).
      *args: its arguments, concrete or abstract with shardings.
      plan: of a jitted function, for the names of the mesh axes. Without it the mesh of the
        compiled function's inputs is used.
      promise: of a jitted function, for the comparison: `gshard.promise(plan, ...)`.

    Raises:
      GShardError: `step` cannot be lowered, or its backend gives no program text.
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
    promise = getattr(step, "promise", None) if promise is None else promise
    mesh = _mesh_of(compiled, args) if plan is None else plan.mesh
    return Audit(rows_of(text, mesh), memory_of(compiled), promise)


def _mesh_of(compiled: Any, args: Any) -> Mesh | AbstractMesh | None:
    """The largest mesh that the inputs lie on."""
    shardings = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
    shardings += [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes on one device by use, as `Audit.memory` has them."""
    stats = compiled.memory_analysis()
    return {name: getattr(stats, field) for name, field in _MEMORY.items() if hasattr(stats, field)}


def rows_of(text: str, mesh: Mesh | AbstractMesh | None) -> tuple[Row, ...]:
    """The collectives of a compiled program's text, as `Audit.collectives` has them.

    Args:
      text: optimized HLO.
      mesh: whose axes are named; None leaves them out.
    """
    grouped: dict[tuple[Any, ...], list[Collective]] = {}
    for whole in read_program(text).collectives:
        if whole.group_size > 1:
            axes = _axes(whole, mesh)
            for (dtype, purpose, scalar), part in _parts(whole).items():
                key = (whole.kind, axes, dtype, purpose, scalar)
                grouped.setdefault(key, []).append(part)
    rows = [
        Row(
            *key,
            count=len(members),
            asynchronous=sum(member.asynchronous for member in members),
            conditional=any(member.conditional for member in members),
            times=total(member.times for member in members),
            elements=total(_run(member, member.elements) for member in members),
            payload_bytes=total(_run(member, member.payload_bytes) for member in members),
            wire_bytes=total(member.wire_bytes for member in members),
        )
        for key, members in grouped.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.scalar, -(row.wire_bytes or 0))))


def _parts(whole: Collective) -> dict[tuple[str, str, bool], Collective]:
    """A collective by dtype, purpose and whether scalar: XLA combines a loss with gradients."""
    parts: dict[tuple[str, str, bool], list[Array]] = {}
    for array, op_name in zip(whole.operands, whole.op_names, strict=True):
        key = (array.dtype, _purpose(whole.kind, op_name), array.elements == 1)
        parts.setdefault(key, []).append(array)
    return {key: dataclasses.replace(whole, operands=tuple(a)) for key, a in parts.items()}


def _axes(collective: Collective, mesh: Mesh | AbstractMesh | None) -> tuple[str, ...] | None:
    """The fewest mesh axes whose groups of devices are the collective's.

    HLO counts devices by their place in the program's device assignment, which under `jit` is the
    flat order of the mesh, whatever the devices' own ids are.
    """
    if mesh is None or collective.kind == "send":
        return None
    names, sizes = mesh.axis_names, mesh.axis_sizes
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if collective.groups is None:
        return tuple(names[i] for i in wide)
    groups = {frozenset(group) for group in collective.groups}
    ids = np.arange(mesh.size).reshape(sizes)
    for many in range(len(wide) + 1):
        for chosen in itertools.combinations(wide, many):
            rest = [i for i in range(len(sizes)) if i not in chosen]
            members = int(np.prod([sizes[i] for i in chosen], dtype=int))
            rows = ids.transpose(*rest, *chosen).reshape(-1, members)
            if {frozenset(row) for row in rows.tolist()} == groups:
                return tuple(names[i] for i in chosen)
    return None


def _purpose(kind: str, op_name: str) -> str:
    """The innermost `gshard/...` scope.

    Differentiation keeps the scope of what it transposes: a gather's transpose is a scatter. The
    primitive, or what a reduction kept of it, tells them apart.
    """
    scopes: list[str] = _SCOPE.findall(op_name)
    purpose = scopes[-1] if scopes else "user" if _WRITTEN.search(op_name) else "compiler"
    summed = kind == "reduce-scatter" or op_name.endswith(("/reduce_scatter", "/add"))
    if purpose == "gather" and summed:
        return "scatter"
    if purpose == "scatter" and kind == "all-gather":
        return "gather"
    return purpose


def _run(collective: Collective, amount: int) -> int | None:
    return None if collective.times is None else collective.times * amount


def _known(row: Row, amount: int | None) -> int:
    if amount is None:
        raise GShardError(
            f"{row.kind} ({row.purpose}) runs in a loop whose length is not constant, so what it "
            "moves is not known; audit the loop's body, or fix its length (lax.scan, fori_loop)"
        )
    return amount


def _promise_dict(promise: Promise) -> dict[str, Any]:
    return dataclasses.asdict(promise) | {"moved": [dataclasses.asdict(m) for m in promise.moved]}


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
