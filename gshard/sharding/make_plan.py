"""Decides every layout of a train state: parameters by rules first, then everything else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util import validation
from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.pytree import belongs_to, check_unique, flatten, path_of
from gshard.sharding.layout import HOST, Layout, lay_out
from gshard.sharding.level import Level
from gshard.sharding.mesh import Group
from gshard.sharding.model_axes import model_axes_of, warn_of_data_axes, warn_of_idle_axes
from gshard.sharding.plan import Plan, ShardedTransformation, all_replicated
from gshard.sharding.precision import Precision, is_floating
from gshard.sharding.rules import Rule, ScanAxes, check_scan_axes, scan_dim_of
from gshard.train_state import FROZEN, OVERWRITTEN, Kind

_SHARED = 2**14  # elements
_advice = ContextVar(
    "advice", default="Lower min_shard_size= of shard_train_state, or divide them with rules=."
)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments that a plan is made from, in addition to its level.

    Attributes:
      state: the user's state, with abstract arrays (`shape` and `dtype` are read).
      kind: the kind of the state.
      tx: the user's optimizer.
      mesh: the device mesh, or an `AbstractMesh`.
      group: the data axes of the mesh.
      rule: a rule that decides every leaf.
      wrap: wraps the optimizer so that it follows a plan.
      scan_axes: the dimensions that scans iterate over, in addition to Flax's metadata: a mapping
        from path pattern to dimension, or the names that the metadata uses (default `layers`,
        `layer`, `scan`).
      precision: dtypes to compute and reduce in, or None.
      offload: whether sharded parameters, and arrays that only an update uses, are stored in host
        memory.
    """

    state: Any
    kind: Kind
    tx: optax.GradientTransformation
    mesh: Mesh | AbstractMesh
    group: Group
    rule: Rule
    wrap: Callable[[Plan], ShardedTransformation]
    scan_axes: ScanAxes = None
    precision: Precision | None = None
    offload: bool = False


def plan_state(level: Level, request: PlanRequest) -> Plan:
    """Decides every layout of an abstract train state at one level."""
    state, kind, group, precision = request.state, request.kind, request.group, request.precision
    scan_axes = request.scan_axes
    parts = kind.split(state)
    paths, leaves, structure = flatten(parts.params)
    names, axes = kind.scan_names(state), kind.mesh_names(state)
    frozen = {name: tree for name, tree in parts.non_trainable.items() if name == FROZEN}

    def by_rule(path: str, leaf: Any, divides: bool, walked: bool = True) -> Layout:
        scan_dim = scan_dim_of(path, leaf, names.get(path), scan_axes) if walked else None
        model_axes = model_axes_of(path, leaf, axes.get(path), group)
        params_replicated = not level.shards_params
        return lay_out(
            path,
            leaf,
            scan_dim,
            group,
            request.rule if divides else None,
            model_axes,
            params_replicated,
        )

    def beside(tree: Any, divides: bool, walked: bool = True) -> Any:
        """Gives arrays that belong to a parameter its layout; the rule decides the others."""
        paths, leaves, structure = flatten(tree)
        same = (
            by_path if divides else {p: x.replicated() for p, x in by_path.items() if x.model_axes}
        )
        alike = _like_parameters(paths, leaves, same)
        found = [
            like or by_rule(path, leaf, divides, walked)
            for path, leaf, like in zip(paths, leaves, alike, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    check_unique(paths, "parameters")
    not_trained = {path: x for tree in frozen.values() for path, x in tree.items()}
    check_scan_axes(scan_axes, {**dict(zip(paths, leaves, strict=True)), **not_trained})
    divided = [by_rule(p, x, level.shards_opt_state) for p, x in zip(paths, leaves, strict=True)]
    by_path = {layout.path: layout for layout in divided}
    non_trainable = {name: beside(tree, level.shards_params) for name, tree in frozen.items()}
    by_path |= {layout.path: layout for layout in jax.tree.leaves(non_trainable)}
    non_trainable |= {
        name: beside({name: tree}, level.shards_params)[name]
        for name, tree in parts.non_trainable.items()
        if name not in (FROZEN, OVERWRITTEN)
    }
    if OVERWRITTEN in parts.non_trainable:
        non_trainable[OVERWRITTEN] = all_replicated(parts.non_trainable[OVERWRITTEN], group)
    computed, master, reduced = _in_precision(divided, precision)
    stored = computed if level.shards_params else [layout.replicated() for layout in computed]
    opt_state = parts.opt_state
    if precision is not None:
        updated = jax.tree.unflatten(structure, [master.get(x.path, x) for x in computed])
        opt_state = _in_dtypes_of(request.tx, updated, opt_state)
    plan = Plan(
        level,
        request.mesh,
        group,
        params=jax.tree.unflatten(structure, stored),
        grads=jax.tree.unflatten(structure, reduced),
        opt_state=beside(opt_state, level.shards_opt_state, walked=False),
        master=master,
        precision=precision,
        non_trainable=non_trainable,
        kind=kind,
        tx=request.tx,
        template=state,
        at_level=lambda other: plan_state(other, request),
        wrap=request.wrap,
    )
    if request.offload:
        plan = _offloaded(plan)
    _warn_of_replicated_params(divided, level)
    warn_of_idle_axes(list(by_path.values()), group)
    warn_of_data_axes(axes, group)
    warn_of_unused("scan_axes", scan_axes, list(by_path))
    if precision is not None:
        warn_of_unused("exceptions", precision.exceptions, list(by_path))
    return plan


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

    names = {layout.path for layout in jax.tree.leaves(plan.grads)}

    def arrays(x: Layout) -> Layout:
        keys = x.path.split("/")
        shared = names.isdisjoint("/".join(keys[i:]) for i in range(len(keys) + 1))
        fits = x.shape and x.size > (_SHARED if shared else 0)
        return x.in_memory(HOST) if fits and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    def divided(x: Layout) -> Layout:
        return x if x.dim is None else x.in_memory(HOST)

    frozen = {name: tree for name, tree in plan.non_trainable.items() if name == FROZEN}
    plan = dataclasses.replace(
        plan,
        params=jax.tree.map(divided, plan.params),
        opt_state=jax.tree.map(arrays, plan.opt_state),
        master=jax.tree.map(arrays, plan.master),
        non_trainable={**plan.non_trainable, **jax.tree.map(divided, frozen)},
    )
    if not plan.bytes_per_device["host"]:
        warn(
            "offload=True puts nothing into the host's memory: this optimizer keeps no arrays, and "
            f"no parameter is sharded at level {plan.level.name!r}."
        )
    return plan


def warn_of_unused(argument: str, patterns: Any, paths: Sequence[str]) -> None:
    """Warns of path patterns that match no path, since they would do nothing."""
    if not isinstance(patterns, Mapping):
        return
    for text in patterns:
        compiled = validation.pattern(text, argument)
        if not any(compiled.search(path) for path in paths):
            warn(
                f"{argument}: the pattern {text!r} matches no path.{did_you_mean(text, paths)} "
                f"There are {some(paths)}."
            )


def _like_parameters(
    paths: Sequence[str], leaves: Sequence[Any], params: Mapping[str, Layout]
) -> list[Layout | None]:
    """Finds the layouts of leaves whose path ends in a parameter's path, with the same shape.

    Compiling `tx.init` would not give these layouts: XLA placed every moment on one device.
    """

    def same_shape(position: int, name: str) -> bool:
        return params[name].shape == tuple(leaves[position].shape)

    return [
        end and dataclasses.replace(params[end[1]], path=path, dtype=leaf.dtype)
        for end, path, leaf in zip(
            belongs_to(paths, params, same_shape), paths, leaves, strict=True
        )
    ]


def _in_precision(
    divided: list[Layout], precision: Precision | None
) -> tuple[list[Layout], dict[str, Layout], list[Layout]]:
    """Returns the layouts of parameters in compute dtypes, master copies by path, and gradients."""
    if precision is None:
        return divided, {}, divided
    computed = [  # complex ones stay
        dataclasses.replace(x, dtype=precision.compute(x.path)) if is_floating(x.dtype) else x
        for x in divided
    ]
    master = {
        x.path: dataclasses.replace(x, dtype=precision.param_dtype)
        for x in computed
        if is_floating(x.dtype) and x.dtype != precision.param_dtype
    }
    if precision.reduce_dtype is None:
        return computed, master, computed
    return (
        computed,
        master,
        [dataclasses.replace(x, dtype=precision.reduce_dtype) for x in computed],
    )


def _in_dtypes_of(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """Returns an abstract optimizer state in the dtypes that `tx` gives it for these parameters."""
    wanted = jax.eval_shape(
        tx.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    )
    dtypes = {path: x.dtype for path, x in zip(*flatten(wanted)[:2], strict=True)}
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.ShapeDtypeStruct(x.shape, dtypes.get(path_of(keys), x.dtype)), opt_state
    )


def _warn_of_replicated_params(layouts: Sequence[Layout], level: Level) -> None:
    """Warns when more than 5 % of the parameters are replicated although the level shards."""
    if not level.shards_opt_state or not layouts or layouts[0].group.size == 1:
        return
    total = sum(layout.local().size for layout in layouts)
    could = [
        x for x in layouts if not x.model_axes or not all(x.model_axes)
    ]  # others are fully sharded over model axes
    whole = sorted((x.local() for x in could if x.dim is None), key=lambda x: -x.size)
    share = sum(x.size for x in whole) / total if total else 0
    if share > 0.05:
        named = some([f"{x.path} {list(x.shape)} ({x.reason})" for x in whole], most=3)
        warn(
            f"{share:.0%} of the parameters stay whole on every device at level "
            f"{level.name!r}: {named}. {_advice.get()}"
        )


@contextlib.contextmanager
def advising(text: str) -> Iterator[None]:
    """Sets the advice that the warning about replicated parameters gives, within a context."""
    token = _advice.set(text)
    try:
        yield
    finally:
        _advice.reset(token)
