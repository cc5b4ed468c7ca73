"""The plan: the layouts of a whole train state, decided once. Nobody downstream decides again."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from rich import box
from rich.console import Console
from rich.table import Table

from gshard import arguments
from gshard.arguments import dimension, shown
from gshard.errors import GShardError, did_you_mean, some, warn
from gshard.host import to_host
from gshard.layout import Layout, lay_out
from gshard.levels import Level
from gshard.mesh import Group
from gshard.optimizer import DividedTransformation, GShardState, divide
from gshard.rules import Rule
from gshard.state import SCAN_NAMES, Kind, Parts, kind_of
from gshard.tree import flatten

ScanAxes = Mapping[str, int] | Sequence[str] | None


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every array of a train state lies, at rest and as a gradient.

    Attributes:
      level: what is divided.
      mesh: concrete, or abstract for planning without devices.
      group: the data axes of the mesh.
      params: a tree of `Layout`s, parameters at rest.
      grads: the same tree, reduced gradients; also the part of a parameter that a device updates.
      opt_state: layouts of the user's optimizer state.
      kind: how the train state splits into parts.
      tx: the user's own optimizer.
      template: the user's state, its arrays abstract and logical.
    """

    level: Level
    mesh: Mesh | AbstractMesh
    group: Group
    params: Any
    grads: Any
    opt_state: Any
    kind: Kind
    tx: optax.GradientTransformation
    template: Any

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that rows lie over; `axis_name=plan.data_axes` for a SyncBN."""
        return self.group.axes

    @property
    def batch_spec(self) -> jax.P:
        """Rows over all data axes."""
        return jax.P(self.group.axes)

    @functools.cached_property
    def optimizer(self) -> DividedTransformation:
        """The user's optimizer, made to follow this plan."""
        return divide(self.tx, self)

    def sharding(self, layout: Layout | None = None) -> NamedSharding:
        """The sharding of one leaf; of a whole one when no layout is given."""
        return NamedSharding(self.mesh, layout.spec if layout else jax.P())

    @property
    def layouts(self) -> Parts:
        """Layouts of all parts, in the trees that the user's state has."""
        parts = self.kind.split(self.template)
        return Parts(
            self.params,
            self.opt_state,
            _all_whole(parts.step, self.group),
            _all_whole(parts.extras, self.group),
        )

    @property
    def shardings(self) -> Parts:
        """The sharding of every array of the state."""
        return jax.tree.map(self.sharding, self.layouts)

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes at rest on one device, by part of the state."""
        layouts = self.layouts
        return {
            name: sum(layout.bytes_per_device for layout in jax.tree.leaves(getattr(layouts, name)))
            for name in ("params", "opt_state", "extras")
        }

    def abstract_parts(self) -> Parts:
        """Every array of the state as stored, abstract, with its sharding."""
        parts = jax.tree.map(
            lambda layout: jax.ShapeDtypeStruct(
                layout.stored_shape, layout.dtype, sharding=self.sharding(layout)
            ),
            self.layouts,
        )
        return dataclasses.replace(parts, opt_state=GShardState(parts.opt_state))

    def abstract_state(self) -> Any:
        """The divided train state, its arrays abstract: what a restore reads into."""
        static = self.kind.split(self.template).static
        parts = dataclasses.replace(self.abstract_parts(), static=static)
        return self.kind.merge(parts, self.template, self.optimizer)

    def unwrap(self, state: Any) -> Any:
        """The user's plain state: host arrays of logical shape, the user's own optimizer."""
        check_state(state, self, "plan.unwrap(state)")
        parts, layouts = self.kind.split(state), self.layouts
        if not isinstance(parts.opt_state, GShardState):
            raise GShardError("plan.unwrap(state): the state is plain already.")
        whole = Parts(
            to_host(parts.params, layouts.params),
            to_host(parts.opt_state.inner, layouts.opt_state),
            to_host(parts.step, layouts.step),
            to_host(parts.extras, layouts.extras),
            parts.static,
        )
        return self.kind.merge(whole, state, self.tx)

    def __repr__(self) -> str:
        return f"Plan(level={self.level.name!r}, group={self.group}, {self.bytes_per_device})"

    def __str__(self) -> str:
        """A table of the parameters and a line of totals."""
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("parameter", "shape", "at rest", "gradient", "bytes per device", "reason"):
            table.add_column(name, justify="right" if name.startswith("bytes") else "left")
        for stored, reduced in zip(
            jax.tree.leaves(self.params), jax.tree.leaves(self.grads), strict=True
        ):
            table.add_row(
                stored.path,
                f"{stored.dtype}{list(stored.shape)}",
                _describe(stored),
                _describe(reduced),
                f"{stored.bytes_per_device:,}",
                reduced.reason,
            )
        out = io.StringIO()
        console = Console(file=out, width=140)
        sizes = ", ".join(f"{name} {n:,} B" for name, n in self.bytes_per_device.items())
        console.print(
            f"level {self.level.name}: {self.group.size} devices {self.group.shard} x "
            f"{self.group.copies} copies"
        )
        console.print(table)
        console.print(f"per device at rest: {sizes}")
        return out.getvalue()


def _describe(layout: Layout) -> str:
    if layout.dim is None:
        return "whole"
    pad = f" + {layout.padding} padded" if layout.padding else ""
    return f"dim {layout.dim} / {layout.group.size}{pad}"


def _all_whole(tree: Any, group: Group) -> Any:
    paths, leaves, structure = flatten(tree)
    found = [lay_out(path, x, None, group, None) for path, x in zip(paths, leaves, strict=True)]
    return jax.tree.unflatten(structure, found)


def make_plan(
    state: Any,
    kind: Kind,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    group: Group,
    level: Level,
    rule: Rule,
    scan_axes: ScanAxes,
) -> Plan:
    """Decides every layout of an abstract train state.

    Args:
      state: the user's state, its arrays abstract (`shape` and `dtype` are read).
      kind: of the state.
      tx: the user's optimizer.
      mesh: devices, or an `AbstractMesh`.
      group: the data axes of the mesh.
      level: what is divided.
      rule: answers for every leaf.
      scan_axes: which dimension a scan walks, beyond what Flax's metadata says: a mapping from path
        pattern to dimension, or the names that the metadata uses (default `layers`, `layer`,
        `scan`).
    """
    parts = kind.split(state)
    paths, leaves, structure = flatten(parts.params)
    fixed = [p for p, x in zip(paths, leaves, strict=True) if not _is_inexact(x.dtype)]
    if fixed:
        raise GShardError(
            f"the parameters {some(fixed)} are not floating and have no gradient. Keep them in "
            "another field of the state, or in a Variable that is no nnx.Param."
        )
    names = kind.scan_names(state)
    divided = []
    for path, leaf, dims in zip(paths, leaves, names, strict=True):
        scan_dim = _scan_dim(path, leaf, dims, scan_axes)
        divided.append(lay_out(path, leaf, scan_dim, group, rule if level.divides_state else None))
    stored = divided if level.divides_params else [layout.whole() for layout in divided]
    plan = Plan(
        level,
        mesh,
        group,
        params=jax.tree.unflatten(structure, stored),
        grads=jax.tree.unflatten(structure, divided),
        opt_state=_lay_out_opt_state(parts.opt_state, divided, group, level, rule),
        kind=kind,
        tx=tx,
        template=state,
    )
    _warn_of_whole_leaves(divided, level)
    warn_of_unused("scan_axes", scan_axes, paths)
    return plan


def warn_of_unused(argument: str, patterns: Any, paths: Sequence[str]) -> None:
    """Warns of patterns on paths that no path matches: they would do nothing."""
    if not isinstance(patterns, Mapping):
        return
    for text in patterns:
        compiled = arguments.pattern(text, argument)
        if not any(compiled.search(path) for path in paths):
            warn(
                f"{argument}: the pattern {text!r} matches no path.{did_you_mean(text, paths)} "
                f"There are {some(paths)}."
            )


def check_call(fn: Any, plan: Any, call: str) -> None:
    """Refuses arguments that are missing or swapped.

    Raises:
      GShardError: names the call and what was given.
    """
    if not callable(fn) or not isinstance(plan, Plan):
        raise GShardError(
            f"{call} was called with ({shown(fn)}, {shown(plan)}). Pass a function, and the plan "
            "that gshard.shard_train_state returned."
        )


def check_state(state: Any, plan: Plan, call: str, inference: bool = False) -> None:
    """Refuses a state of another kind.

    Raises:
      GShardError: names the call and what was given.
    """
    if inference and plan.kind.is_inference(state):
        return
    try:
        what = "" if type(kind_of(state)) is type(plan.kind) else f"state is {shown(state)}."
    except GShardError as error:
        what = str(error)
    if what:
        raise GShardError(
            f"{call}: {what} Here, pass what gshard.shard_train_state returned with this plan, in "
            "this order."
        )


def check_optimizer(state: Any, plan: Plan, call: str) -> None:
    """Refuses a state whose optimizer was replaced: the plan's would be used.

    Raises:
      GShardError: names the call.
    """
    tx = plan.kind.tx(state)
    if not isinstance(tx, DividedTransformation):
        raise GShardError(
            f"{call}: the optimizer of this state was replaced, and the plan's would be used. Keep "
            "the one that gshard.shard_train_state returned; for another optimizer divide "
            "plan.unwrap(state).replace(tx=...) anew. (A learning rate can change inside "
            "optax.inject_hyperparams.)"
        )
    if tx.plan.tx is not plan.tx and tuple(tx.plan.tx) != tuple(plan.tx):
        warn(
            f"{call}: the state was divided with another optimizer than this plan's, of the same "
            "state; the plan's is used. To silence this, give both calls of "
            "gshard.shard_train_state the same optimizer object."
        )


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _lay_out_opt_state(
    opt_state: Any, params: Sequence[Layout], group: Group, level: Level, rule: Rule
) -> Any:
    """A leaf whose path ends in a parameter's, of its shape, lies as that; others by the rule.

    Not by jitting `tx.init`, which put every moment on one device.
    """
    by_path = {layout.path: layout for layout in params}

    def place(path: str, leaf: Any) -> Layout:
        keys = path.split("/")
        for start in range(len(keys) + 1):  # the longest suffix first
            like = by_path.get("/".join(keys[start:]))
            if like is not None and like.shape == tuple(leaf.shape):
                return Layout(
                    path, like.shape, leaf.dtype, like.dim, group, like.scan_dim, like.reason
                )
        return lay_out(path, leaf, None, group, rule if level.divides_state else None)

    paths, leaves, structure = flatten(opt_state)
    return jax.tree.unflatten(structure, [place(p, x) for p, x in zip(paths, leaves, strict=True)])


def _scan_dim(
    path: str, leaf: Any, names: Sequence[str | None] | None, scan_axes: ScanAxes
) -> int | None:
    rank = len(leaf.shape)
    if isinstance(scan_axes, Mapping):
        for pattern, dim in scan_axes.items():
            if arguments.pattern(pattern, "scan_axes").search(path):
                found = dimension(dim, rank)
                if found is None:
                    raise GShardError(
                        f"scan_axes[{pattern!r}]={shown(dim)} is no dimension of {path} "
                        f"{leaf.shape}."
                    )
                return found
    if scan_axes is not None and not isinstance(scan_axes, (Mapping, Sequence)):
        raise GShardError(
            f"scan_axes={shown(scan_axes)} must map path patterns to dimensions, such as "
            "{'^layers/': 0}, or be the names that Flax's metadata uses."
        )
    known = SCAN_NAMES if scan_axes is None or isinstance(scan_axes, Mapping) else scan_axes
    if isinstance(known, str):
        known = (known,)
    return next((d for d, name in enumerate(names or ()) if name in known), None)


def _warn_of_whole_leaves(layouts: Sequence[Layout], level: Level) -> None:
    """One warning when more than 5 % of the parameters stay whole although the level divides."""
    if not level.divides_state or not layouts or layouts[0].group.size == 1:
        return
    total = sum(layout.size for layout in layouts)
    whole = sorted((x for x in layouts if x.dim is None), key=lambda x: -x.size)
    share = sum(x.size for x in whole) / total if total else 0
    if share > 0.05:
        named = some([f"{x.path} {list(x.shape)} ({x.reason})" for x in whole], most=3)
        warn(
            f"{share:.0%} of the parameters stay whole on every device at level "
            f"{level.name!r}: {named}. Lower segment_size, or divide them with rules=."
        )
