"""What an expert axis would change for a run whose model has arrays that can be kept on it.

These are arrays whose metadata names the axis, and those of which a dimension is a batch dimension
of every matrix product that they are in, as the experts of a mixture are.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from rich.table import Table

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.jaxpr import body_of
from gshard._util.jaxpr_dataflow import flow, flow_inside, if_equal
from gshard._util.pytree import flatten
from gshard._util.text import bytes_of, text_table
from gshard.analysis.aot.target import Target
from gshard.analysis.calibration import Calibration
from gshard.analysis.config import Config
from gshard.analysis.forecast import abstract_mesh, footprint_of, level_forecast
from gshard.analysis.memory.footprint import trace_step
from gshard.analysis.setup import (
    Choices,
    TrainSetup,
    batch_bytes,
    batch_of,
    load_setup,
    sharded_setup,
    step_of,
    without_arrays,
)
from gshard.analysis.tune import Option, Verdict, step_cost
from gshard.sharding.group import entry_axes
from gshard.sharding.topology import EXPERT, REPLICA, SEQUENCE
from gshard.train_state import as_state, kind_of

_LEAST = 0.1  # of the parameters that can be kept, from which an axis is worth a line
_MOST = 3  # sizes of the axis that are compared
# They give an array of the same shape, of which each entry is one of the operand.
_ENTRYWISE = ("convert_element_type", "copy", "name", "optimization_barrier",
              "reduce_precision", "sharding_constraint")  # fmt: skip

# An input of a jaxpr, and the dimensions of it that those of a value are.
_Source = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class ExpertAxis:
    """What an axis that keeps some parameters changes, on one device: now, and with it.

    Attributes:
      argument: what is written for it, of `make_mesh` and of `shard_train_state`.
      stored: bytes between steps, in device and host memory.
      sent: bytes that a device sends in one step.
      network: of these to other nodes.
      peak: estimated bytes at the peak of a step.
      seconds: of a step, by the model of time.
    """

    argument: str
    stored: tuple[int, int]
    sent: tuple[int, int]
    network: tuple[int, int]
    peak: tuple[int, int]
    seconds: tuple[float, float]

    def as_dict(self, base: float = 1.0) -> dict[str, Any]:
        """Everything as a dict, ready for JSON; times in units of `base`."""
        return dataclasses.asdict(self) | {"seconds": [x / base for x in self.seconds]}


def expert_axes(
    config: Config, found: Sequence[Verdict], measured: Calibration | None = None
) -> list[ExpertAxis]:
    """Says what expert axes of a few sizes would change for the first option; the largest first."""
    target, first = config.target, found[0].option
    if target is None or config.expert > 1 or first.choices.offload:
        return []
    setup = without_arrays(load_setup(config.model, {**config.arguments, **first.arguments}))
    if setup.loss_fn is None:
        return []
    with warnings.catch_warnings():  # every option gave its own before
        warnings.simplefilter("ignore", GShardWarning)
        named, dims = keepable(setup)
        return _compared(setup, target, first, named, dims, measured) if dims else []


def _compared(
    setup: TrainSetup,
    target: Target,
    first: Option,
    named: bool,
    dims: Mapping[str, tuple[int, tuple[int, ...]]],
    measured: Calibration | None,
) -> list[ExpertAxis]:
    """Returns what axes of a few sizes change that keep these arrays."""
    keep = {} if named else patterns(dims, _params(setup))
    free = target.devices // (first.replica * first.sequence)
    most = math.gcd(free, *(shape[dim] for dim, shape in dims.values()))
    sizes = [n for n in range(most, 1, -1) if most % n == 0][:_MOST]

    def amounts(option: Option) -> tuple[Any, ...]:
        mesh, near = option.mesh(target.devices), target.devices_per_node
        state, plan = sharded_setup(setup, mesh, option.level, option.choices)
        batch = batch_bytes(setup, plan, option.choices)
        level = level_forecast(plan, option.choices, batch, near)
        seen = footprint_of(setup, state, plan, option.choices, target.platform, near)
        seconds = step_cost(target, plan, level, seen, measured).step
        stored = level.stored + level.host
        return stored, seen.wire_bytes, seen.network_bytes, seen.peak, seconds

    now, made = amounts(first) if sizes else (), []
    for size in sizes:
        choices = dataclasses.replace(first.choices, keep=keep)
        with_axis = dataclasses.replace(first, expert=size, choices=choices)
        try:
            then = amounts(with_axis)
        except GShardError:  # such as a loss of each device alone, which cannot use experts
            continue
        axes = {name: getattr(with_axis, name) for name in (REPLICA, EXPERT, SEQUENCE)}
        axes_text = ", ".join(f"{name}={n}" for name, n in axes.items() if n > 1)
        words = f"make_mesh({axes_text})" + (f", keep={keep}" if keep else "")
        made.append(ExpertAxis(words, *zip(now, then, strict=True)))
    return made


def keepable(setup: TrainSetup) -> tuple[bool, dict[str, tuple[int, tuple[int, ...]]]]:
    """Returns the arrays that can be kept, by path: the dimension of the experts, and the shape.

    The first result says whether the model's metadata names the axis. Nothing is returned if these
    are few of the parameters.
    """
    params = _params(setup)
    names = kind_of(as_state(setup.state)).mesh_names(setup.state)
    dims = {
        path: next(d for d, entry in enumerate(names[path]) if EXPERT in entry_axes(entry))
        for path in params
        if any(EXPERT in entry_axes(entry) for entry in names.get(path, ()))
    }
    named = bool(dims)
    if not named and setup.loss_fn is not None:
        with suppress(Exception):  # a loss that one example on one device does not suit
            dims = batch_dims(setup)
    found = {path: (dim, params[path]) for path, dim in dims.items()}
    share = sum(math.prod(shape) for _, shape in found.values())
    of = sum(map(math.prod, params.values()))
    return named, found if share >= _LEAST * of else {}


def _params(setup: TrainSetup) -> dict[str, tuple[int, ...]]:
    state = as_state(setup.state)
    paths, leaves, _ = flatten(kind_of(state).split(state).params)
    return {path: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}


def batch_dims(setup: TrainSetup) -> dict[str, int]:
    """Returns parameters with a dimension that is a batch dimension of all products they are in."""
    choices = Choices()
    state, plan = sharded_setup(setup, abstract_mesh(1), "dp", choices)
    traced = trace_step(step_of(setup, plan, choices), state, batch_of(setup, plan, choices))
    found: dict[int, list[set[int]]] = defaultdict(list)  # by input: batch dimensions, by product

    def transfer(eqn: Any, values: list[_Source | None]) -> Sequence[_Source | None]:
        name = eqn.primitive.name
        if name == "shard_map":
            return flow(body_of(eqn)[0], values, transfer)
        if name in _ENTRYWISE:
            return values
        if name == "transpose":
            order = eqn.params["permutation"]
            return [x and (x[0], tuple(x[1][d] for d in order)) for x in values]
        if name in ("dot_general", "ragged_dot_general"):
            batches = _batch_dims_of(eqn)
            for x, batch in zip(values, batches, strict=False):
                if x is not None:
                    found[x[0]].append({x[1][d] for d in batch})
        follow = partial(flow, transfer=transfer)
        inside = flow_inside(eqn, values, follow, if_equal, lambda x: x and (x[0], x[1][1:]))
        return inside or [None] * len(eqn.outvars)

    jaxpr = traced.jaxpr.jaxpr
    layouts = jax.tree.leaves(plan.layouts)
    inputs = [(i, tuple(range(v.aval.ndim))) for i, v in enumerate(jaxpr.invars)]
    flow(jaxpr, inputs, transfer)
    params = {x.path for x in jax.tree.leaves(plan.params)}
    always = {layouts[i].path: set.intersection(*of) for i, of in found.items() if i < len(layouts)}
    return {path: min(dims) for path, dims in always.items() if dims and path in params}


def _batch_dims_of(eqn: Any) -> Sequence[Sequence[int]]:
    """Returns the batch dimensions of both operands; groups of rows are those of a ragged one."""
    if eqn.primitive.name == "dot_general":
        return eqn.params["dimension_numbers"][1]
    of = eqn.params["ragged_dot_dimension_numbers"]
    rows, matrices = of.dot_dimension_numbers[1]
    return rows, (*matrices, *of.rhs_group_dimensions)


def patterns(
    found: Mapping[str, tuple[int, tuple[int, ...]]], params: Mapping[str, Any]
) -> dict[str, tuple[str, int]]:
    """Returns `keep=` of some arrays: patterns that match the ends of their paths, and no other."""
    by_dim: dict[int, set[str]] = defaultdict(set)
    for path, (dim, _) in found.items():
        by_dim[dim].add(path)
    return {_pattern(paths, params): (EXPERT, dim) for dim, paths in sorted(by_dim.items())}


def _pattern(paths: set[str], params: Mapping[str, Any], parts: int = 1) -> str:
    """Returns the shortest pattern of at least `parts` parts of the paths that matches no other."""
    ends = sorted({"/".join(path.split("/")[-parts:]) for path in paths})
    text = f"(^|/)({'|'.join(map(re.escape, ends))})$"
    matched = {path for path in params if re.search(text, path)}
    if matched == paths:
        return text
    if parts > max(path.count("/") for path in paths):  # others end in the longest of them
        return f"^({'|'.join(map(re.escape, sorted(paths)))})$"
    return _pattern(paths, params, parts + 1)


def expert_axes_table(found: Sequence[ExpertAxis]) -> list[Table | str]:
    """Returns a table of the axes, with the times of a step in units of that without one."""
    if not found:
        return []
    network = any(x.network[0] for x in found)
    columns = ("sent", "with it", *(("between nodes", "with it") * network))
    title = "With experts kept on an axis, for the first option as traced: bytes of one device"
    columns = ("stored", "with it", *columns, "peak", "with it", "step")
    table = text_table(title, ("axis",), columns)
    for x in found:
        pairs = (*x.stored, *x.sent, *(x.network if network else ()), *x.peak)
        ratio = f"{x.seconds[1] / x.seconds[0]:.2f}x"
        axis, _, _ = x.argument.partition(", keep=")
        table.add_row(axis, *map(bytes_of, pairs), ratio)
    _, _, keep = found[0].argument.partition(", keep=")
    about = f"shard_train_state(keep={keep})" if keep else "the model's metadata names the experts"
    return [table, f'Kept by {about}: see the page "Mixtures of experts".']
