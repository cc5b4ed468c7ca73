"""Decides every layout of a train state: parameters by rules first, then everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import belongs_to, check_unique, flatten
from gshard.sequence.order import Order
from gshard.sharding.batch_specs import SequenceDims
from gshard.sharding.group import Group, entry_axes
from gshard.sharding.keep import Keep, kept_params
from gshard.sharding.layout import HOST, Layout, all_replicated, lay_out, model_axes_of
from gshard.sharding.level import Level, parse_level
from gshard.sharding.nodes import nodes_of
from gshard.sharding.opt_state_dtypes import as_initialized, as_updated
from gshard.sharding.plan import Plan, ShardedTransformation
from gshard.sharding.precision import Precision, is_floating
from gshard.sharding.rules import (
    LeafInfo,
    Rule,
    ScanAxes,
    ShardDim,
    check_scan_axes,
    scan_dim_of,
    warn_of_unused,
    warn_of_unused_scan_axes,
)
from gshard.sharding.state_dtype import quantized_state
from gshard.sharding.topology import EXPERT
from gshard.sharding.wire import Wire, with_wire
from gshard.train_state import FROZEN, OVERWRITTEN, Kind

_MOST_PADDED = 1.1  # times the elements of sharded parameters, stored without a warning
_LEAST_PADDING = 2**20  # elements of padding that are worth a warning
_SMALL = 2**14  # elements of an array that stays on the device if it belongs to no parameter


@dataclass(frozen=True)
class PlanRequest:
    """The arguments that a plan is made from, in addition to its level.

    Attributes:
      state: the user's state, with abstract arrays (`shape` and `dtype` are read).
      tx: the user's optimizer.
      group: the data axes of the mesh.
      rule: a rule that decides every leaf.
      wrap: wraps the optimizer so that it follows a plan.
      scan_axes: the user's argument.
      keep: the user's argument.
      offload: whether sharded parameters, and arrays that only an update uses, are stored in host
        memory.
      wire: in which dtypes collectives send parameters and gradients.
      sequence_order: which slices of a sequence a device computes.
      sequence_dims: the dimension of the sequence of arrays of a batch, by path patterns.
      advice: how to have the parameters sharded that are replicated, for a warning.
    """

    state: Any
    kind: Kind
    tx: optax.GradientTransformation
    mesh: Mesh | AbstractMesh
    group: Group
    rule: Rule
    wrap: Callable[[Plan], ShardedTransformation]
    scan_axes: ScanAxes = None
    keep: Keep | None = None
    precision: Precision | None = None
    offload: bool = False
    advice: str = ""
    sequence_order: Order = "contiguous"
    sequence_dims: SequenceDims = field(default_factory=dict)
    wire: Wire | None = None


def plan_state(level: Level, request: PlanRequest) -> Plan:
    """Decides every layout of an abstract train state at one level."""
    kind, group, precision = request.kind, request.group, request.precision
    parts = kind.split(request.state)
    scan_names, mesh_names = kind.scan_names(request.state), kind.mesh_names(request.state)
    known: dict[str, Layout] = {}  # by path: the layouts of parameters, once they are decided
    paths, leaves, _ = flatten(parts.params)
    check_unique(paths, "parameters")
    others = dict(parts.non_trainable)
    frozen = {FROZEN: others.pop(FROZEN)} if FROZEN in others else {}
    overwritten = {OVERWRITTEN: others.pop(OVERWRITTEN)} if OVERWRITTEN in others else {}
    params = dict(zip(paths, leaves, strict=True)) | frozen.get(FROZEN, {})
    check_scan_axes(request.scan_axes, params)

    def scan_dim(path: str, leaf: Any) -> int | None:
        return scan_dim_of(path, leaf, scan_names.get(path), request.scan_axes)

    scan_dims = {path: scan_dim(path, leaf) for path, leaf in params.items()}
    apart = flatten(others)[:2]
    untrained = dict(zip(apart[0], _parameters_of(*apart, params), strict=True))
    keeps = kept_params(request.keep, params, mesh_names, scan_dims, group, untrained)
    for own in keeps.values():  # all on one axis
        group = dataclasses.replace(group, kept=own.axis)

    def by_rule(path: str, leaf: Any, sharded: bool, scanned: bool) -> Layout:
        own = keeps.get(path) if scanned else None
        rule = request.rule if scanned else _for_optimizer(request.rule)
        return lay_out(
            path,
            leaf,
            group if own is None else group.without(own.axis),
            rule if sharded else None,
            scan_dim=scan_dim(path, leaf) if scanned else None,
            model_axes=model_axes_of(path, leaf, mesh_names.get(path), group),
            params_replicated=not level.shards_params,
            kept=own,
        )

    def layouts_of(tree: Any, sharded: bool, scanned: bool = True) -> Any:
        """Gives arrays that belong to a parameter its layout; the rule decides the others."""
        paths, leaves, structure = flatten(tree)
        params = known
        if not sharded:
            fixed = {path: x for path, x in known.items() if x.model_axes or x.kept}
            params = {path: x.replicated() for path, x in fixed.items()}
        alike = _like_parameters(paths, leaves, params)
        return structure.unflatten(
            like or by_rule(path, leaf, sharded, scanned)
            for path, leaf, like in zip(paths, leaves, alike, strict=True)
        )

    trained = layouts_of(parts.params, level.shards_opt_state)
    known |= {layout.path: layout for layout in jax.tree.leaves(trained)}
    non_trainable = {name: layouts_of(tree, level.shards_params) for name, tree in frozen.items()}
    known |= {layout.path: layout for layout in jax.tree.leaves(non_trainable)}
    for name, tree in others.items():
        own = layouts_of({name: tree}, level.shards_params)
        non_trainable |= jax.tree.map(_unpadded_key, own)
    non_trainable |= {name: all_replicated(tree, group) for name, tree in overwritten.items()}
    computed, master, reduced = _in_precision(trained, precision)
    nodes = nodes_of(request.mesh)
    sent, reduced = with_wire(computed, reduced, master, request.wire, level, nodes)
    opt_state = parts.opt_state
    updated = jax.tree.map(lambda x: master.get(x.path, x), computed)
    if precision is not None:
        opt_state = as_initialized(request.tx, updated, opt_state)
    opt_state = as_updated(request.tx, updated, opt_state)
    plan = Plan(
        level,
        request.mesh,
        group,
        params=sent if level.shards_params else jax.tree.map(Layout.replicated, sent),
        grads=reduced,
        opt_state=layouts_of(opt_state, level.shards_opt_state, scanned=False),
        master=master,
        precision=precision,
        non_trainable=non_trainable,
        kind=kind,
        tx=request.tx,
        template=request.state,
        at_level=lambda other: plan_state(parse_level(other), request),
        wrap=request.wrap,
        sequence_order=request.sequence_order,
        named_sequence_dims=request.sequence_dims,
    )
    if request.offload:
        plan = _offloaded(plan)
    if precision is not None and precision.state_dtype is not None:
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), reduced)
        state, kept = quantized_state(precision, plan.opt_state, known, request.tx, own)
        plan = dataclasses.replace(plan, opt_state=state, not_quantized=kept)
    _warn_of_replicated_params(jax.tree.leaves(trained), level, request.advice)
    _warn_of_padding(list(known.values()), request.rule, level)
    _warn_of_idle_axes(list(known.values()), group)
    _warn_of_data_axes(mesh_names, group)
    warn_of_unused_scan_axes(request.scan_axes, list(known), scan_names.values())
    if precision is not None:
        warn_of_unused("exceptions", precision.exceptions, list(known))
        warn_of_unused("wire_exceptions", precision.wire_exceptions, list(known))
        paths = [x.path for x in jax.tree.leaves(plan.decoded_opt_state)]
        warn_of_unused("state_exceptions", precision.state_exceptions, [*known, *paths])
    return plan


def _like_parameters(
    paths: Sequence[str], leaves: Sequence[Any], params: Mapping[str, Layout]
) -> list[Layout | None]:
    """Finds the layouts of leaves that belong to a parameter.

    Compiling `tx.init` would not give these layouts: XLA placed every moment on one device.
    """
    names = _parameters_of(paths, leaves, params)
    return [
        None if name is None else dataclasses.replace(params[name], path=path, dtype=leaf.dtype)
        for name, path, leaf in zip(names, paths, leaves, strict=True)
    ]


def _parameters_of(
    paths: Sequence[str], leaves: Sequence[Any], params: Mapping[str, Any]
) -> list[str | None]:
    """Returns for each leaf the parameter of its shape whose path ends its own, or None."""

    def same_shape(position: int, name: str) -> bool:
        return tuple(params[name].shape) == tuple(leaves[position].shape)

    return [end and end[1] for end in belongs_to(paths, params, same_shape)]


def _for_optimizer(rule: Rule) -> Rule:
    """Adds to what a rule refuses that it was asked for an array of the optimizer."""

    def ask(leaf: LeafInfo) -> ShardDim | None:
        try:
            return rule(leaf)
        except GShardError as error:
            raise GShardError(
                f"{error} This is an array of the optimizer: a pattern that begins with '^', as in "
                "'^embedding$', matches only parameters."
            ) from error

    return ask


def _unpadded_key(layout: Layout) -> Layout:
    """Replicates what may be an old-style random key, which padding would make another array."""
    is_key = layout.dtype == jnp.uint32 and layout.shape[-1:] in ((2,), (4,))
    if not is_key or not layout.padding:
        return layout
    return dataclasses.replace(layout.replicated(), reason="may be a random key")


def _in_precision(trained: Any, precision: Precision | None) -> tuple[Any, dict[str, Layout], Any]:
    """Returns the layouts of parameters in compute dtypes, master copies by path, and gradients."""
    if precision is None:
        return trained, {}, trained

    def compute(x: Layout) -> Layout:  # complex ones stay
        dtype = precision.compute(x.path) if is_floating(x.dtype) else x.dtype
        return dataclasses.replace(x, dtype=dtype)

    computed = jax.tree.map(compute, trained)
    master = {
        x.path: dataclasses.replace(x, dtype=precision.param_dtype)
        for x in jax.tree.leaves(computed)
        if is_floating(x.dtype) and x.dtype != precision.param_dtype
    }
    if (dtype := precision.reduce_dtype) is None:
        return computed, master, computed

    def reduced(x: Layout) -> Layout:
        return dataclasses.replace(x, dtype=dtype) if is_floating(x.dtype) else x

    return computed, master, jax.tree.map(reduced, computed)


def _offloaded(plan: Plan) -> Plan:
    """Returns the plan with the optimizer state and sharded parameters in host memory.

    Scalars and replicated parameters stay on the device: fetching them would cost more time than
    the memory is worth. So do small arrays that belong to no parameter, such as Muon's
    coefficients, since every group of an update would have to fetch them.
    """
    if isinstance(plan.mesh, Mesh):
        try:
            NamedSharding(plan.mesh, jax.P(), memory_kind=HOST)
        except ValueError as error:
            raise GShardError(
                f"offload=True needs devices that reach memory of the kind {HOST!r}, and "
                f"{plan.mesh.devices.flat[0]} does not. Leave it out here. (JAX says: {error})"
            ) from error

    params = {layout.path for layout in jax.tree.leaves(plan.grads)}

    def of_update(x: Layout) -> Layout:
        keys = x.path.split("/")
        shared = params.isdisjoint("/".join(keys[i:]) for i in range(len(keys) + 1))
        fits = x.shape and x.size > (_SMALL if shared else 0)
        return x.in_memory(HOST) if fits and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    def of_loss(x: Layout) -> Layout:
        return x if x.dim is None else x.in_memory(HOST)

    frozen = {name: tree for name, tree in plan.non_trainable.items() if name == FROZEN}
    plan = dataclasses.replace(
        plan,
        params=jax.tree.map(of_loss, plan.params),
        opt_state=jax.tree.map(of_update, plan.opt_state),
        master=jax.tree.map(of_update, plan.master),
        non_trainable=plan.non_trainable | jax.tree.map(of_loss, frozen),
    )
    if not plan.bytes_per_device["host"]:
        warn(
            "offload=True puts nothing into the host's memory: this optimizer keeps no arrays, and "
            f"no parameter is sharded at level {plan.level.name!r}."
        )
    return plan


def _warn_of_replicated_params(layouts: Sequence[Layout], level: Level, advice: str) -> None:
    """Warns when more than 5 % of the parameters are replicated although the level shards."""
    if not level.shards_opt_state or all(x.group.size == 1 for x in layouts):
        return
    total = sum(layout.local().size for layout in layouts)
    # Without those all of whose dimensions are sharded over model-parallel axes.
    could = [x for x in layouts if not x.model_axes or not all(x.model_axes)]
    could = [x for x in could if x.dim is None and x.group.size > 1]
    replicated = sorted(could, key=lambda x: -x.local().size)
    share = sum(x.local().size for x in replicated) / total if total else 0

    def name(x: Layout) -> str:
        over = f"; sharded only over {x.kept.axis!r}" if x.kept is not None else ""
        return f"{x.path} {list(x.shape)} ({x.reason}{over})"

    if share > 0.05:
        named = some(map(name, replicated), most=3)
        warn(
            f"{share:.0%} of the parameters are replicated at level {level.name!r}, and so is "
            f"their optimizer state: {named}. {advice}"
        )


def _warn_of_padding(layouts: Sequence[Layout], rule: Rule, level: Level) -> None:
    """Warns when padding takes more than 10 % of sharded parameters, and says what replicas do."""
    sharded = [x for x in layouts if x.dim is not None and x.kept is None]
    padded, size = _padded(sharded), sum(x.local().size for x in sharded)
    if padded <= _MOST_PADDED or (padded - 1) * size < _LEAST_PADDING:
        return
    group = sharded[0].group

    def over(devices: int) -> list[Layout]:
        """The same arrays in shard groups of this many devices."""
        other = dataclasses.replace(group, shard=group.shard[:1], sizes=(devices,))
        return [
            lay_out(
                x.path,
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                other,
                rule,
                scan_dim=x.scan_dim,
                model_axes=x.model_axes,
                params_replicated=not level.shards_params,
            )
            for x in sharded
        ]

    divisors = (n for n in range(2, group.size + 1) if group.size % n == 0)
    replicas, better = next(
        (n, found) for n in divisors if _padded(found := over(group.size // n)) <= _MOST_PADDED
    )
    short = [x for x in sharded if x.padding]
    worst = sorted(short, key=lambda x: x.local().size - x.local().stored_size)
    named = some([f"{x.path} {list(x.shape)} in dimension {x.dim}" for x in worst], most=3)
    memory = [sum(x.bytes_per_device for x in found) for found in (sharded, better)]
    warn(
        f"sharded over {group.size:,} devices, parameters take {padded:.2f} times as many elements "
        "as they have, in memory and in every all-gather and reduce-scatter, because short "
        f"dimensions are padded, most of all {named}. "
        f"gshard.make_mesh(replica={group.replicas * replicas}) shards over "
        f"{group.size // replicas:,}: {_padded(better):.2f} times as many elements, and "
        f"{memory[1] / memory[0]:.2f} times the memory of each device."
        + " rules= may choose a longer dimension."
        * (replicas == group.size)
    )


def _padded(layouts: Sequence[Layout]) -> float:
    """How many times as many elements are stored as the arrays have."""
    found = [x.local() for x in layouts]
    return sum(x.stored_size for x in found) / (sum(x.size for x in found) or 1)


def _warn_of_idle_axes(layouts: Sequence[Layout], group: Group) -> None:
    """Warns of model-parallel axes that shard nothing: devices along them repeat work."""
    used = {name for layout in layouts for names in layout.model_axes for name in names}
    idle = [name for name, size in group.model_axes if size > 1 and name not in used]
    if idle:
        warn(
            f"no parameter is sharded over mesh axes {some(idle)}: devices along them repeat the "
            "same work. Name them in the model's metadata (nn.with_partitioning; logical names "
            "need rules, nn.logical_axis_rules, where shard_train_state is called), pass arrays "
            "that are sharded over them, or let gshard shard over them too: "
            f"shard_axes={(*group.shard, *idle)}."
        )


def _warn_of_data_axes(metadata: Mapping[str, Sequence[Any]], group: Group) -> None:
    """Warns once if metadata names data axes, which gshard shards over by its own rules."""
    paths: dict[str, list[str]] = {}
    for path, names in metadata.items():
        for name in {x for entry in names for x in entry_axes(entry)} & {*group.axes} - {EXPERT}:
            paths.setdefault(name, []).append(path)
    if paths:
        axis = min(paths)
        rest = tuple(name for name in group.shard if name not in paths) or ("shard",)
        warn(
            f"the metadata of {some(paths[axis])} names the mesh axis {axis!r}, but gshard shards "
            "over that axis by its own rules and ignores the metadata for it. If the axis is for "
            f"tensor parallelism, name the axes that gshard shards over: shard_axes={rest}."
        )
