"""Decides every layout of a train state, once: rules for the parameters, then all the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from gshard import arguments
from gshard.arguments import dimension, shown
from gshard.errors import GShardError, did_you_mean, some, warn
from gshard.layout import Layout, lay_out
from gshard.levels import Level
from gshard.mesh import Group
from gshard.plan import Plan
from gshard.rules import Rule
from gshard.state import SCAN_NAMES, Kind
from gshard.tree import flatten

ScanAxes = Mapping[str, int] | Sequence[str] | None


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
