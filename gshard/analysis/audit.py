"""`audit` reads what a compiled step communicates, and its memory."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError
from gshard._util.jaxpr import COLLECTIVES
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.analysis.audit_report import Audit, CollectiveRow, sum_known
from gshard.analysis.hlo import Array, Collective, CompiledProgram, read_program
from gshard.sharding.budget import Budget
from gshard.sharding.nodes import Nodes, groups_along, nodes_of
from gshard.sharding.plan import Plan
from gshard.train.global_loss.transfers import NEEDED_BY

_SCOPE = re.compile(r"\bgshard/(\w+)")
# A user's own collective: the name of its primitive is the end of its name stack.
_WRITTEN = re.compile(f"/({'|'.join(COLLECTIVES)})$")
_TRANSPOSED = "transpose("  # in the name stack of a backward pass, with what it computes again
_USES = ("argument", "output", "alias", "temp")
_MEMORY = {use: f"{use}_size_in_bytes" for use in (*_USES, *(f"host_{use}" for use in _USES))}
_MEMORY["peak"] = "peak_memory_in_bytes"


@short_traceback
def audit(
    step: Any,
    *args: Any,
    plan: Plan | None = None,
    budget: Budget | None = None,
    devices_per_node: int | None = None,
) -> Audit:
    """Compiles a step for these arguments, and reads what it communicates and keeps in memory.

    Nothing is executed and no argument is donated. Collectives of a single device transfer nothing,
    and are left out.

    Args:
      step: a step of `make_train_step`, or any jitted function (`jax.jit`, `nnx.jit`).
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
      plan: the plan of a jitted function, for the names of the mesh axes; by default the mesh of
        its inputs gives them.
      budget: a budget for the comparison. By default the step's own, if `make_train_step` made it,
        which ignores `devices_per_node`. To compare bytes between nodes, pass
        `gshard.budget(plan, ..., devices_per_node=...)`.
      devices_per_node: how many adjacent devices of the mesh share fast links, such as the 8 GPUs
        of a host. By default JAX says so of GPUs and TPUs; CPU devices are one node.

    Returns:
      What the compiled program communicates and keeps; print it for a report.

    Raises:
      GShardError: `step` cannot be lowered, the backend has no text of its programs, or
        `devices_per_node` does not divide the devices.

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
            f"audit: step={shown(step)} has no .lower(). Pass what make_train_step returned, or "
            "wrap the function in jax.jit or nnx.jit."
        )
    for name, given, attribute, call in (
        ("plan", plan, "mesh", "shard_train_state"),
        ("budget", budget, "communicated", "budget"),
    ):
        if given is not None and not hasattr(given, attribute):
            raise GShardError(
                f"audit: {name}={shown(given)}. Pass the {name} that gshard.{call} returned."
            )
    compiled = step.lower(*args).compile()
    text = compiled.as_text()
    if text is None:
        raise GShardError(
            f"audit: {jax.default_backend()} gives no text of a compiled program. Audit the step "
            "on CPU devices (gshard.virtual_devices)."
        )
    plan = getattr(step, "plan", None) if plan is None else plan
    budget = getattr(step, "budget", None) if budget is None else budget
    mesh = _mesh_of(compiled, args) if plan is None else plan.mesh
    platform = jax.default_backend() if mesh is None else ""
    if isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
    memory = compiled_memory(compiled, platform)
    transfers = getattr(step, "loss_transfers", None) or ()
    nodes = None if mesh is None else nodes_of(mesh, devices_per_node)
    program = read_program(text)
    model_axes = {} if plan is None else dict(plan.group.model_axes)
    rows = collective_rows(program, mesh, nodes, model_axes)
    count = 1 if nodes is None else nodes.count
    return Audit(rows, memory, budget, transfers, count, program.flops)


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


def collective_rows(
    program: CompiledProgram,
    mesh: Mesh | AbstractMesh | None,
    nodes: Nodes | None = None,
    model_axes: Collection[str] = (),
) -> tuple[CollectiveRow, ...]:
    """Returns the collectives of a compiled program, as in `Audit.collectives`.

    `model_axes` are the user's model-parallel axes: what XLA adds over them is for their layouts.
    """
    grouped: dict[tuple[Any, ...], list[Collective]] = {}
    for combined in program.collectives:
        if combined.group_size == 1:
            continue
        # XLA combines collectives of several purposes, such as those of a loss and gradients.
        apart: dict[tuple[Any, ...], list[Array]] = {}
        axes = _axes(combined, mesh)
        for array, op_name in zip(combined.operands, combined.op_names, strict=True):
            purpose = _purpose(combined.kind, op_name)
            if purpose == "compiler" and axes and set(axes) <= set(model_axes):
                purpose = "user"
            key = (
                _kind(combined.kind, purpose),
                axes,
                array.dtype,
                purpose,
                purpose == "scalar" or _is_scalar(combined.kind, purpose, array),
                purpose == "loss" and _TRANSPOSED in op_name,
            )
            apart.setdefault(key, []).append(array)
        for key, arrays in apart.items():
            one = dataclasses.replace(combined, operands=tuple(arrays))
            grouped.setdefault(key, []).append(one)
    rows = [
        CollectiveRow(
            *key[:-1],
            backward=key[-1],
            count=len(members),
            asynchronous=sum(x.asynchronous for x in members),
            conditional=any(x.conditional for x in members),
            times=sum_known(x.times for x in members),
            elements=sum_known(x.times and x.times * x.elements for x in members),
            payload_bytes=sum_known(x.times and x.times * x.payload_bytes for x in members),
            wire_bytes=sum_known(x.wire_bytes for x in members),
            network_bytes=sum_known(
                0 if nodes is None else x.network_bytes(nodes) for x in members
            ),
        )
        for key, members in grouped.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.scalar, -(row.wire_bytes or 0))))


def _is_scalar(kind: str, purpose: str, array: Array) -> bool:
    """Whether one element is a loss, a norm or the like, not a device's shard of an array."""
    of_the_state = purpose in ("gather", "scatter", "reduce", "update", "non_trainable")
    return array.elements == 1 and kind != "all-gather" and not of_the_state


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
    subsets = (itertools.combinations(wide, many) for many in range(len(wide) + 1))
    for chosen in itertools.chain.from_iterable(subsets):
        if {frozenset(row) for row in groups_along(sizes, chosen).tolist()} == groups:
            return tuple(names[i] for i in chosen)
    return None


def _purpose(kind: str, op_name: str) -> str:
    """Returns the innermost `gshard/...` scope of a name stack.

    Differentiation keeps the scope of what it transposes, and the transpose of a gather is a
    scatter: the primitive, or what a reduction kept of it, tells them apart.
    """
    scopes: list[str] = _SCOPE.findall(op_name)
    purpose = scopes[-1] if scopes else "user" if _WRITTEN.search(op_name) else "compiler"
    if not op_name and kind == "ragged-all-to-all":  # nameless on GPU; XLA adds none by itself
        return "user"
    if not scopes and NEEDED_BY.search(op_name):  # by the loss, over a sequence or expert axis
        return "loss"
    summed = kind == "reduce-scatter" or op_name.endswith(("/reduce_scatter", "/add"))
    if purpose == "gather" and summed:
        return "scatter"
    if purpose == "scatter" and kind == "all-gather":
        return "gather"
    return purpose


def _kind(kind: str, purpose: str) -> str:
    """A reduce-scatter is an all-to-all and a sum over Gloo, and of quantized gradients."""
    return "reduce-scatter" if (kind, purpose) == ("all-to-all", "scatter") else kind
