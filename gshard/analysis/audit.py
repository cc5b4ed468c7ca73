"""What a compiled step really communicates and keeps, beside what the plan promised."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError
from gshard.analysis.audit_report import Audit, Row, total
from gshard.analysis.hlo import Array, Collective, read_program

if TYPE_CHECKING:
    from gshard.sharding.budget import Budget
    from gshard.sharding.plan import Plan

_SCOPE = re.compile(r"\bgshard/(\w+)")
# A collective that somebody wrote: its primitive ends the name.
_WRITTEN = re.compile(
    r"/(psum|psum_invariant|pmax|pmin|all_gather|reduce_scatter|all_to_all|ppermute)$"
)
_USES = ("argument", "output", "alias", "temp")
_MEMORY = {use: f"{use}_size_in_bytes" for use in (*_USES, *(f"host_{use}" for use in _USES))}
_MEMORY["peak"] = "peak_memory_in_bytes"


def audit(step: Any, *args: Any, plan: Plan | None = None, budget: Budget | None = None) -> Audit:
    """Compiles a step for these arguments and reads what it communicates and keeps.

    Nothing is executed and no argument is donated. Collectives among one device are left out, they
    move nothing.

    Args:
      step: what `make_train_step` returns, or any jitted function (`jax.jit`, `nnx.jit`).
      *args: its arguments, concrete or abstract with shardings.
      plan: of a jitted function, for the names of the mesh axes. Without it the mesh of the
        compiled function's inputs is used.
      budget: of a jitted function, for the comparison: `gshard.budget(plan, ...)`.

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
    budget = getattr(step, "budget", None) if budget is None else budget
    mesh = _mesh_of(compiled, args) if plan is None else plan.mesh
    return Audit(rows_of(text, mesh), memory_of(compiled), budget)


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
