"""Decides every layout of a train state, once: rules for the parameters, then all the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from gshard import arguments
from gshard.arguments import dimension, shown
from gshard.errors import GShardError, did_you_mean, some, warn
from gshard.layout import Layout, lay_out
from gshard.levels import Level
from gshard.mesh import Group
from gshard.plan import Plan
from gshard.precision import Precision, is_floating
from gshard.rules import Rule
from gshard.state import FROZEN, SCAN_NAMES, Kind
from gshard.tree import flatten, path_of, refuse_twice

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
    precision: Precision | None,
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
      precision: dtypes to compute and reduce in, or None.
    """
    parts = kind.split(state)
    paths, leaves, structure = flatten(parts.params)
    names = kind.scan_names(state)
    frozen = {name: tree for name, tree in parts.extras.items() if name == FROZEN}

    def by_rule(path: str, leaf: Any, divides: bool, walked: bool = True) -> Layout:
        scan_dim = _scan_dim(path, leaf, names.get(path), scan_axes) if walked else None
        whole_at_rest = not level.divides_params
        return lay_out(path, leaf, scan_dim, group, rule if divides else None, whole_at_rest)

    def beside(tree: Any, divides: bool, walked: bool = True) -> Any:
        """What belongs to a parameter lies as that does; the rest by the rule."""
        paths, leaves, structure = flatten(tree)
        alike = _like_parameters(paths, leaves, by_path if divides else {})
        found = [
            like or by_rule(path, leaf, divides, walked)
            for path, leaf, like in zip(paths, leaves, alike, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    refuse_twice(paths, "parameters")
    not_trained = {path: x for tree in frozen.values() for path, x in tree.items()}
    _check_scan_axes(scan_axes, {**dict(zip(paths, leaves, strict=True)), **not_trained})
    divided = [by_rule(p, x, level.divides_state) for p, x in zip(paths, leaves, strict=True)]
    by_path = {layout.path: layout for layout in divided}
    extras = {name: beside(tree, level.divides_params) for name, tree in frozen.items()}
    by_path |= {layout.path: layout for layout in jax.tree.leaves(extras)}
    extras |= {
        name: beside({name: tree}, level.divides_params)[name]
        for name, tree in parts.extras.items()
        if name not in frozen
    }
    master: dict[str, Layout] = {}
    reduced = divided
    opt_state = parts.opt_state
    if precision is not None:
        reduced = [_computed(layout, precision) for layout in divided]
        master = {
            x.path: dataclasses.replace(x, dtype=precision.param_dtype)
            for x in reduced
            if is_floating(x.dtype) and x.dtype != precision.param_dtype
        }
        masters = jax.tree.unflatten(structure, [master.get(x.path, x) for x in reduced])
        opt_state = _in_dtypes_of(tx, masters, opt_state)
    stored = reduced if level.divides_params else [layout.whole() for layout in reduced]
    if precision is not None and precision.reduce_dtype is not None:
        reduced = [dataclasses.replace(x, dtype=precision.reduce_dtype) for x in reduced]
    plan = Plan(
        level,
        mesh,
        group,
        params=jax.tree.unflatten(structure, stored),
        grads=jax.tree.unflatten(structure, reduced),
        opt_state=beside(opt_state, level.divides_state, walked=False),
        master=master,
        precision=precision,
        extras=extras,
        kind=kind,
        tx=tx,
        template=state,
    )
    _warn_of_whole_leaves(divided, level)
    warn_of_unused("scan_axes", scan_axes, list(by_path))
    if precision is not None:
        warn_of_unused("exceptions", precision.exceptions, list(by_path))
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


def _like_parameters(
    paths: Sequence[str], leaves: Sequence[Any], params: Mapping[str, Layout]
) -> list[Layout | None]:
    """Layouts of leaves whose path ends in a parameter's, and that have its shape.

    Moments, master copies, averages. Not found by jitting `tx.init`, which put every moment on one
    device. Where two endings fit (a parameter `mu/w` beside `w`), the one whose beginning holds
    more parameters is meant, then the longer one.
    """

    def endings(path: str, leaf: Any) -> list[tuple[str, Layout]]:
        keys = path.split("/")
        ends = [("/".join(keys[:i]), "/".join(keys[i:])) for i in range(len(keys) + 1)]
        shape = tuple(leaf.shape)
        return [(b, params[e]) for b, e in ends if e in params and params[e].shape == shape]

    found = [endings(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    held = Counter(beginning for ends in found for beginning, _ in ends)
    best = [max(ends, key=lambda end: held[end[0]], default=None) for ends in found]
    return [
        end and dataclasses.replace(end[1], path=path, dtype=leaf.dtype)
        for end, path, leaf in zip(best, paths, leaves, strict=True)
    ]


def _computed(layout: Layout, precision: Precision) -> Layout:
    """A parameter in the dtype that it is computed with; complex ones stay."""
    if not is_floating(layout.dtype):
        return layout
    return dataclasses.replace(layout, dtype=precision.compute(layout.path))


def _in_dtypes_of(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """An optimizer state in the dtypes that `tx` gives it for these parameters."""
    wanted = jax.eval_shape(
        tx.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    )
    dtypes = {path: x.dtype for path, x in zip(*flatten(wanted)[:2], strict=True)}
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.ShapeDtypeStruct(x.shape, dtypes.get(path_of(keys), x.dtype)), opt_state
    )


def _check_scan_axes(scan_axes: ScanAxes, params: Mapping[str, Any]) -> None:
    """Refuses `scan_axes` that are no names and no dimensions of the parameters they match."""
    if scan_axes is not None and not isinstance(scan_axes, (Mapping, Sequence)):
        raise GShardError(
            f"scan_axes={shown(scan_axes)} must map path patterns to dimensions, such as "
            "{'^layers/': 0}, or be the names that Flax's metadata uses."
        )
    if not isinstance(scan_axes, Mapping):
        return
    for path, leaf in params.items():
        found = _pattern_for(path, scan_axes)
        if found is not None and dimension(scan_axes[found], len(leaf.shape)) is None:
            raise GShardError(
                f"scan_axes[{found!r}]={shown(scan_axes[found])} is no dimension of {path} "
                f"{leaf.shape}."
            )


def _scan_dim(
    path: str, leaf: Any, names: Sequence[str | None] | None, scan_axes: ScanAxes
) -> int | None:
    """The dimension that a scan walks; a pattern that fits a field by chance does not count."""
    known = SCAN_NAMES if scan_axes is None else scan_axes
    if isinstance(scan_axes, Mapping):
        found = _pattern_for(path, scan_axes)
        if found is not None:
            return dimension(scan_axes[found], len(leaf.shape))
        known = SCAN_NAMES
    known = (known,) if isinstance(known, str) else known
    return next((d for d, name in enumerate(names or ()) if name in known), None)


def _pattern_for(path: str, scan_axes: Mapping[str, Any]) -> str | None:
    matches = (p for p in scan_axes if arguments.pattern(p, "scan_axes").search(path))
    return next(matches, None)


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
