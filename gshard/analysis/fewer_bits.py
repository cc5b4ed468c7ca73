"""What `wire="int8"` and `state_dtype="int8"` would change for a run, from budgets alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from rich.table import Table

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.text import bytes_of, text_table
from gshard.analysis.setup import Choices, TrainSetup, sharded_setup
from gshard.sharding.budget import Budget, budget
from gshard.sharding.nodes import nodes_of
from gshard.sharding.plan import Plan
from gshard.sharding.precision import Precision, as_precision, is_floating
from gshard.sharding.topology import SEQUENCE


@dataclass(frozen=True)
class FewerBits:
    """What an argument of `shard_train_state` changes, in bytes of one device.

    Attributes:
      argument: the argument as it is written, with that of the mesh where it needs another one.
      stored: bytes between steps, in device and host memory, now and with it.
      sent: bytes that a device sends in one step, now and with it.
      network: of these to other nodes.
      reason: why it cannot be used here; empty if it can.
    """

    argument: str
    stored: tuple[int, int] = (0, 0)
    sent: tuple[int, int] = (0, 0)
    network: tuple[int, int] = (0, 0)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Everything as a dict, ready for JSON."""
        return dataclasses.asdict(self)


def fewer_bits(
    setup: TrainSetup,
    mesh: Mesh | AbstractMesh,
    level: str,
    choices: Choices,
    devices_per_node: int | None = None,
) -> list[FewerBits]:
    """Says what each of the two arguments would give, where the setup does not use it already."""
    _, plan = sharded_setup(setup, mesh, level, choices)
    now = budget(plan, **choices.of_step, devices_per_node=devices_per_node)
    precision = as_precision(setup.shard.get("precision"))
    found: list[FewerBits] = []

    def add(argument: str, on: Mesh | AbstractMesh, words: str = "", **shard: Any) -> None:
        other = dataclasses.replace(setup, shard={**setup.shard, **shard})
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, new = sharded_setup(other, on, level, choices)
        except GShardError as error:
            found.append(FewerBits(argument, reason=str(error)))
            return
        then = budget(new, **choices.of_step, devices_per_node=devices_per_node)
        stored, sent, network = _amounts(now, then)
        reason = ""
        if stored[0] == stored[1] and sent[0] == sent[1]:
            said = [str(x.message) for x in caught if issubclass(x.category, GShardWarning)]
            about = (x for x in said if "changes nothing" in x or "has no effect" in x)
            reason = next(about, "It changes nothing.")
        found.append(FewerBits(argument + words, stored, sent, network, reason))

    sends = precision is not None and (precision.gather_dtype or precision.scatter_dtype)
    if plan.level.shards_opt_state and not sends and setup.shard.get("wire") is None:
        nodes, size = nodes_of(mesh, devices_per_node), plan.group.size
        if not any(nodes.mixes(axis) for axis in plan.group.shard):
            add("wire='int8'", mesh, wire="int8")
        elif plan.group.sequence > 1 or plan.group.kept:
            other = SEQUENCE if plan.group.sequence > 1 else plan.group.kept
            why = (
                "An axis of the mesh has several devices of several nodes, in addition to the axis "
                f"{other!r}."
            )
            found.append(FewerBits("wire='int8'", reason=why))
        elif devices_per_node and size % devices_per_node == 0:
            on, words = _by_nodes(plan, devices_per_node)
            add("wire='int8'", on, f", on {words}", wire="int8", shard_axes=("local", "node"))
        else:
            why = f"{size} devices in a shard group are on parts of nodes of {devices_per_node}."
            found.append(FewerBits("wire='int8'", reason=why))
    if precision is None or precision.state_dtype is None:
        base = precision or _as_it_is(plan)
        if base is None:
            why = "the parameters have several dtypes: name a compute dtype in precision= first."
            found.append(FewerBits("gshard.Precision(state_dtype='int8')", reason=why))
        else:
            small = dataclasses.replace(base, state_dtype="int8")
            add(f"precision={written(small)}", mesh, precision=small)
    return found


def _amounts(now: Budget, then: Budget) -> list[tuple[int, int]]:
    """Returns stored bytes, sent bytes, and those to other nodes, now and then."""

    def stored(x: Budget) -> int:
        return sum(x.resident.values()) + sum(x.host.values())

    pairs = ((stored(x), x.wire_bytes, x.network_bytes) for x in (now, then))
    return list(zip(*pairs, strict=True))


def _by_nodes(plan: Plan, devices_per_node: int) -> tuple[AbstractMesh, str]:
    """Returns a mesh whose nodes have a shard axis of their own, and the call that makes it."""
    count, replicas = plan.group.size // devices_per_node, plan.group.replicas
    sizes = {"node": count, "local": devices_per_node}
    made = {**{name: plan.mesh.shape[name] for name in plan.group.replica}, **sizes}
    mesh = AbstractMesh(tuple(made.values()), tuple(made), axis_types=(AxisType.Auto,) * len(made))
    more = f", replica={replicas}" if replicas > 1 else ""
    return mesh, f"gshard.make_mesh({sizes}{more})"


def _as_it_is(plan: Plan) -> Precision | None:
    """Returns the precision that changes nothing; None where parameters have several dtypes."""
    dtypes = {x.dtype for x in jax.tree.leaves(plan.params) if is_floating(x.dtype)}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return Precision(dtype, dtype)


def written(precision: Precision) -> str:
    """Returns a `Precision` as it is written in a program."""

    def text(x: Any) -> str:
        return repr({k: getattr(v, "name", v) for k, v in x.items()} if isinstance(x, dict)
                    else getattr(x, "name", x))  # fmt: skip

    usual = Precision()
    fields = [(x.name, getattr(precision, x.name)) for x in dataclasses.fields(precision)[1:]]
    more = [f"{name}={text(x)}" for name, x in fields if x != getattr(usual, name)]
    return f"gshard.Precision({', '.join([text(precision.compute_dtype), *more])})"


def fewer_bits_table(found: Sequence[FewerBits]) -> list[Table | str]:
    """Returns a table of what can be used, and a line of what cannot."""
    usable = [x for x in found if not x.reason]
    network = any(x.network[0] for x in usable)
    columns = ("stored", "with it", "sent", "with it", *(("between nodes", "with it") * network))
    parts: list[Table | str] = []
    if usable:
        title = "In fewer bits, for the first option: bytes of one device"
        table = text_table(title, ("argument of shard_train_state",), columns)
        for x in usable:
            amounts = (*x.stored, *x.sent, *(x.network if network else ()))
            table.add_row(x.argument, *map(bytes_of, amounts))
        parts.append(table)
    return [*parts, *(f"Not here: {x.argument}. {x.reason}" for x in found if x.reason)]
