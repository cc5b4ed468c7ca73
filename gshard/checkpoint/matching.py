"""Which stored arrays a restore reads, and how they become those of a state.

A state may have master copies or frozen parameters that the checkpoint lacks, or the other way
round; `source_of` finds the stored array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard._util.text import pattern_without
from gshard.checkpoint.arrays import (
    FIELDS,
    FROZEN_PARAMS,
    MASTER,
    PARAMS,
    WEIGHTS,
    ArrayInfo,
    layouts_of,
    weight_at,
)
from gshard.checkpoint.casts import CASTS, can_cast
from gshard.checkpoint.quantized import AT_ONCE, convert, nodes_of, stored_otherwise
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.shard_train_state import shard_leaf
from gshard.train_state import Components

Advice = Callable[[Collection[str], Collection[str], Collection[str]], str]
Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]]
_SHOWN = 100  # differences that a message lists


def read_components(
    read: Read,
    stored: Mapping[str, ArrayInfo],
    plan: Plan,
    cast: bool,
    fresh: Mapping[str, Any] = MappingProxyType({}),
    kept: Mapping[str, jax.Array] = MappingProxyType({}),
) -> Components:
    """The arrays of a checkpoint as the components of a state; names each array that differs.

    `read` returns arrays by path with the shapes, dtypes and shardings of abstract ones. `fresh`
    has values by path for arrays that the checkpoint does not have to contain, `kept` arrays of the
    state that stay whatever it contains.
    """
    layouts = layouts_of(plan)
    new = {path: fresh[path] for path in layouts if path in fresh and path not in stored}
    arrays = {path: shard_leaf(x, layouts[path], plan) for path, x in new.items()}
    for group in _to_read(stored, plan, cast, {*new, *kept}, partial(_advice, kept, fresh)):
        arrays |= _read_group(read, group, plan)
    leaves = [
        kept[path] if path in kept else _as_stored(arrays.get(path), x, plan)
        for path, x in layouts.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(plan.layouts), leaves)


def read_one_by_one(
    read: Read, stored: Mapping[str, ArrayInfo], plan: Plan, paths: Collection[str]
) -> Iterator[tuple[str, jax.Array]]:
    """What `read_components` with `cast=True` reads of some arrays, one array or moment at a time.

    Random keys are their data, as in `arrays_of`.
    """
    for group in _to_read(stored, plan, True, (), partial(_advice, (), ()), alone=True):
        if any(path in paths for path in group.paths()):
            found = _read_group(read, group, plan)
            yield from ((path, x) for path, x in found.items() if path in paths)


def arrays_to_read(
    stored: Mapping[str, ArrayInfo], plan: Plan, cast: bool, kept: Collection[str] = ()
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """What `read_components` passes to `read`, call by call."""
    groups = _to_read(stored, plan, cast, kept, partial(_advice, kept, ()))
    return [{s: _abstract(x, plan) for s, x in group.arrays.values()} for group in groups]


def _advice(
    kept: Collection[str],
    fresh: Collection[str],
    stored: Collection[str],
    own: Collection[str],
    wrong: Collection[str],
) -> str:
    """What to do about a checkpoint whose arrays are not those of the state, all by path."""
    if fresh:  # a checkpoint of another program
        return "It is of another model or optimizer."
    if clashing := [p for p in wrong if _has_path_of_parameter(p, {*stored, *own})]:
        return (
            f"A parameter has the same path as {some(clashing)}, so only= cannot tell them apart. "
            "Give like= the further fields that were saved, or choose another checkpoint or "
            "directory."
        )
    (theirs, mine), differ = map(_trained_and_frozen, (stored, own)), _weights(wrong)
    parameters = theirs[0] | theirs[1] | mine[0] | mine[1]
    if not (parameters & _weights(own) & _weights(stored)) - differ:  # stored: what only= chooses
        if kept:
            return "No weight that only= chooses fits. Choose others, or another checkpoint."
        return "It is of another model: no parameter fits. Choose another checkpoint or directory."
    chosen = differ | _weights(kept)  # without those that the user has left out
    only = pattern_without(chosen, _weights([*stored, *own])) if chosen else "."
    if kept:
        return f"Leave out what differs: only={only!r}."
    if differ:
        said, what = "It is of another model.", "the weights that both have"
    elif changed := theirs[0] & mine[1] or theirs[1] & mine[0]:
        there, here = ("trained", "frozen") if changed <= mine[1] else ("frozen", "trained")
        said = f"What is {there} in the checkpoint is {here} in like=: {some(sorted(changed))}."
        what = "just the weights"
    else:
        said, what = "It is of another optimizer.", "just the weights"
    return (
        f"{said} To start from step 0, choose another directory. "
        f"restore(like=state, only={only!r}) restores {what}, without the optimizer's state and "
        "the step."
    )


def _has_path_of_parameter(path: str, paths: Collection[str]) -> bool:
    """Whether it is a further field whose path is that of a parameter among these."""
    weight = path.removeprefix(FIELDS)
    return path == FIELDS + weight and any(x + weight in paths for x in WEIGHTS if x != FIELDS)


def _weights(paths: Iterable[str]) -> set[str]:
    return {name for path in paths if (name := weight_at(path)) is not None}


def _trained_and_frozen(paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """The paths of the parameters of both kinds."""
    found = [[p.removeprefix(x) for p in paths if p.startswith(x)] for x in (PARAMS, FROZEN_PARAMS)]
    return {*found[0]}, {*found[1]}


class _Group(NamedTuple):
    """Arrays that are read together.

    `arrays` are the stored path and the layout of each, by the path in the state; `to_convert` the
    layouts of moments as read and as they are converted after that, by the path of the moment.
    """

    arrays: dict[str, tuple[str, Layout]]
    to_convert: dict[str, tuple[Any, Any]]

    def paths(self) -> Iterable[str]:
        """The paths in the state of all its arrays."""
        moments = [_leaves_at(path, wanted) for path, (_, wanted) in self.to_convert.items()]
        return [p for x in moments for p, _ in x] if moments else self.arrays


def _read_group(read: Read, group: _Group, plan: Plan) -> dict[str, jax.Array]:
    """The arrays of a group by their paths in the state, converted if need be."""
    found = read({source: _abstract(x, plan) for source, x in group.arrays.values()})
    arrays = {path: found[source] for path, (source, _) in group.arrays.items()}
    for path, (layout, wanted) in group.to_convert.items():
        paths = [p for p, _ in _leaves_at(path, layout)]
        x = jax.tree.unflatten(jax.tree.structure(layout), map(arrays.pop, paths))
        made = jax.tree.leaves(convert(x, layout, wanted, plan))
        arrays |= zip([p for p, _ in _leaves_at(path, wanted)], made, strict=True)
    return arrays


def _to_read(
    stored: Mapping[str, ArrayInfo],
    plan: Plan,
    cast: bool,
    new: Collection[str],
    advice: Advice,
    alone: bool = False,
) -> list[_Group]:
    """The arrays to read, in groups: at most two, and those of moments to convert.

    With `alone`, each array and each moment is a group.
    """
    nodes, others = nodes_of(plan), stored_otherwise(plan, stored)
    layouts = {
        p: x for path, node in nodes.items() for p, x in _leaves_at(path, others.get(path, node))
    }
    sources = {p: source_of(p, x, stored, layouts) for p, x in layouts.items() if p not in new}
    check_fit(stored, layouts, sources, cast, advice)
    of_others = [dict(_leaves_at(path, x)) for path, x in others.items()]
    plain = {p: s for p, s in sources.items() if not any(p in x for x in of_others)}
    groups = [
        _Group({p: (sources[p], layouts[p]) for p in paths if layouts[p].size}, {})
        for paths in ([[p] for p in plain] if alone else _with_distinct_sources(plain))
    ]
    most = 0 if alone else AT_ONCE
    size = most
    for (path, layout), leaves in zip(others.items(), of_others, strict=True):
        more = sum(x.bytes_per_device for x in leaves.values())
        if size + more > most:
            groups, size = [*groups, _Group({}, {})], 0
        groups[-1].arrays.update({p: (sources[p], x) for p, x in leaves.items()})
        groups[-1].to_convert[path] = layout, nodes[path]
        size += more
    return groups


def _leaves_at(path: str, layout: Any) -> list[tuple[str, Layout]]:
    """The paths and layouts of the arrays that are stored for a layout, or for a moment."""
    paths, leaves, _ = flatten(layout)
    return [(f"{path}/{p}" if p else path, x) for p, x in zip(paths, leaves, strict=True)]


def source_of(
    path: str, layout: Layout, stored: Mapping[str, ArrayInfo], own: Collection[str]
) -> str:
    """Returns the path of the stored array that the array at `path` is read from.

    A weight may be stored as another kind of array: as its master copy, frozen, or not trained.
    `own` are the paths of all arrays of the state.
    """
    weight = weight_at(path)
    if weight is None or (path in stored and not path.startswith(PARAMS)):
        return path
    if _has_path_of_parameter(path, own):
        return path
    places = [x + weight for x in WEIGHTS if x + weight in stored]
    if len(places) > 1 and places[-1] == FIELDS + weight:
        places.pop()  # a field with the path of a parameter
    return min(places, key=lambda x: stored[x].dtype != str(layout.dtype), default=path)


def check_fit(
    stored: Mapping[str, ArrayInfo],
    layouts: Mapping[str, Layout],
    sources: Mapping[str, str],
    cast: bool,
    advice: Advice,
) -> None:
    """Raises a `GShardError` that lists each array in which a checkpoint differs from a state.

    `advice` says what to do if not only dtypes differ, from the paths of all arrays of both and of
    those that differ.
    """
    used = set(sources.values())
    # A parameter may be read from its master copy, and a master copy may be unused.
    unused = [p for p in stored if not (p in used or p.startswith(MASTER) or _master(p) in used)]
    wrong = {p: f"  {p} is only in the checkpoint" for p in unused}
    wrong |= {p: f"  {p} is not in the checkpoint" for p, s in sources.items() if s not in stored}
    dtypes = []
    for path, source in sources.items():
        info, layout = stored.get(source), layouts[path]
        if info is None:
            continue
        if info.shape != layout.shape:
            wrong[path] = f"  {path} has the shape {layout.shape}, in the checkpoint {info.shape}"
        elif info.dtype != str(layout.dtype):
            rounded = path.startswith(PARAMS) and _master(path) in layouts
            if not rounded and not (cast and can_cast(info.dtype, layout.dtype)):
                dtypes.append(f"  {path} is {layout.dtype}, in the checkpoint {info.dtype}")
    fix = "Pass cast=True to convert them." if not cast else CASTS
    if wrong:
        fix = advice(stored, layouts, wrong)
    if lines := [*wrong.values(), *dtypes]:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        lines = ["the checkpoint does not fit the state:", *lines[:_SHOWN], *more, fix]
        raise GShardError("\n".join(lines))


def _master(path: str) -> str:
    return MASTER + path.removeprefix(PARAMS)


def _with_distinct_sources(sources: Mapping[str, str]) -> Iterable[list[str]]:
    """The paths in at most two groups; in each, no two are read from the same stored array."""
    first: dict[str, str] = {}
    for path, source in sources.items():
        first.setdefault(source, path)
    groups = [list(first.values()), [p for p, s in sources.items() if first[s] != p]]
    return [group for group in groups if group]


def _abstract(layout: Layout, plan: Plan) -> jax.ShapeDtypeStruct:
    """The abstract array to read; for random keys, their data."""
    if not is_key(layout):
        return plan.abstract(layout)
    data, _ = _abstract_key_data(layout)
    replicated = NamedSharding(plan.mesh, jax.P())
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=replicated)


def _as_stored(x: Any, layout: Layout, plan: Plan) -> jax.Array:
    if x is None:  # it has no elements, so nothing was written
        empty = jnp.zeros(layout.stored_shape, layout.dtype)
        return jax.device_put(empty, plan.sharding(layout))
    if is_key(layout):
        return jax.random.wrap_key_data(x, impl=_abstract_key_data(layout)[1])
    return x


def _abstract_key_data(layout: Layout) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The abstract data of random keys, and their generator."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(layout.shape, layout.dtype))
    return data, found[0]
