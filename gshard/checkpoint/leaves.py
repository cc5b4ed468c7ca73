"""A train state as arrays by path, and back: the same paths at every level and on every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from gshard.errors import GShardError
from gshard.fit import refuse_donated
from gshard.host import plan_of
from gshard.layout import Layout
from gshard.plan import Plan, check_state
from gshard.shard import place
from gshard.state import FROZEN, Parts
from gshard.tree import flatten, refuse_twice
from gshard.unreduced import Unreduced

PARAMS, MASTER = "params/", "opt_state/master/"
_FROZEN = f"extras/{FROZEN}/"
_SHOWN = 100  # differences that a message lists


Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]]


@runtime_checkable
class KeepsGradients(Protocol):
    """A model that keeps gradients beside its state, as a wrapped one does."""

    def _gshard_refuse_waiting(self) -> None:
        """Raises a `GShardError` where some wait to be reduced."""


@dataclass(frozen=True)
class LeafInfo:
    """What a checkpoint says of one array.

    Attributes:
      shape: logical; for keys of `jax.random` that of the keys.
      dtype: its name; `key<fry>` and the like for keys.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def split_like(like: Any, call: str) -> tuple[Any, Plan]:
    """The state and the plan to restore into.

    Args:
      like: what `shard_train_state` returned, concrete or abstract; the state alone will do.
      call: for messages.

    Raises:
      GShardError: it is none of these, or its mesh has no devices.
    """
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], Plan):
        state, plan = like
        check_state(state, plan, call)
    elif isinstance(like, Plan):
        state, plan = like.abstract_state(), like
    elif like is None:
        raise GShardError(
            f"{call} was given no like=: pass the state that gshard.shard_train_state returned, or "
            "(abstract state, plan), so that arrays are read to where they will lie."
        )
    else:
        state, plan = like, plan_of(like, call)
    if isinstance(plan.mesh, AbstractMesh):
        raise GShardError(f"{call}: the plan has an abstract mesh: it has no devices to read to.")
    return state, plan


def arrays_of(state: Any, plan: Plan) -> tuple[dict[str, jax.Array], dict[str, LeafInfo]]:
    """A state's arrays as stored, by path, without empty ones, and what all of them are.

    Raises:
      GShardError: arrays were given away, or gradients wait to be reduced.
    """
    for owner in state if isinstance(state, tuple) else ():
        if isinstance(owner, KeepsGradients):
            owner._gshard_refuse_waiting()
    parts = plan.kind.split(state)
    waiting = [x for x in jax.tree.leaves(parts, is_leaf=_unreduced) if _unreduced(x)]
    if waiting:
        raise GShardError(
            "save: the state holds Unreduced gradients, which differ on every device. End them "
            "with gshard.reduce_gradients(acc, plan) and update before you save."
        )
    paths, leaves, _ = flatten(parts)
    refuse_twice(paths, "arrays of the state")
    refuse_donated(leaves)
    described = layouts_of(plan)
    if paths != list(described):
        raise GShardError(
            "save: the state is not the one that its plan was made for: "
            + "; ".join(_differing(dict.fromkeys(described), dict.fromkeys(paths)))
        )
    known = {path: LeafInfo(x.shape, str(x.dtype)) for path, x in described.items()}
    arrays = {p: _data(x) for p, x in zip(paths, leaves, strict=True) if np.size(x)}
    return arrays, known


def layouts_of(plan: Plan) -> dict[str, Layout]:
    """The layouts of all parts of a state, by path."""
    paths, layouts, _ = flatten(plan.layouts)
    return dict(zip(paths, layouts, strict=True))


def restored(
    read: Read,
    stored: Mapping[str, LeafInfo],
    state: Any,
    plan: Plan,
    cast: bool,
    fresh: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A state like `state`, with the arrays of a checkpoint.

    Args:
      read: gives arrays by path, each as the abstract one says.
      stored: what the checkpoint holds.
      state: to be like, concrete or abstract.
      plan: where its arrays lie.
      cast: whether another dtype is converted.
      fresh: values by path of what the checkpoint need not hold.

    Raises:
      GShardError: paths, shapes or dtypes that differ, each by its name.
    """
    layouts = layouts_of(plan)
    new = {path: fresh[path] for path in layouts if path in fresh and path not in stored}
    sources = {path: _source(path, x, stored) for path, x in layouts.items() if path not in new}
    check_fit(stored, layouts, sources, cast)
    arrays = {path: place(x, layouts[path], plan) for path, x in new.items()}
    for paths in _one_to_one(sources):
        found = read({sources[p]: _abstract(layouts[p], plan) for p in paths if layouts[p].size})
        arrays |= {p: found[sources[p]] for p in paths if layouts[p].size}
    leaves = [_as_stored(arrays.get(path), x, plan) for path, x in layouts.items()]
    parts: Parts = jax.tree.unflatten(jax.tree.structure(plan.layouts), leaves)
    return with_parts(parts, state, plan)


def with_parts(parts: Parts, state: Any, plan: Plan) -> Any:
    """A state like `state` with these arrays; a concrete NNX pair is changed in place."""
    own = plan.kind.split(state)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(own))
    if abstract or getattr(plan.kind.tx(state), "plan", None) is not plan:
        parts = dataclasses.replace(parts, static=plan.kind.split(plan.template).static)
        return plan.kind.merge(parts, state, plan.optimizer)
    new = plan.kind.update(state, dataclasses.replace(parts, static=own.static))
    return state if new is None else new


def check_fit(
    stored: Mapping[str, LeafInfo],
    layouts: Mapping[str, Layout],
    sources: Mapping[str, str],
    cast: bool,
) -> None:
    """Refuses a checkpoint of another model, leaf by leaf."""
    used = set(sources.values())
    # A parameter may be read from its master copy, and a master copy may be of no use.
    unused = [p for p in stored if not (p in used or p.startswith(MASTER) or _master(p) in used)]
    wrong = [f"  {p} is in the checkpoint alone" for p in unused]
    wrong += [f"  {p} is not in the checkpoint" for p, s in sources.items() if s not in stored]
    others = []
    for path, source in sources.items():
        info, layout = stored.get(source), layouts[path]
        if info is None:
            continue
        if info.shape != layout.shape:
            wrong.append(f"  {path} has the shape {layout.shape}, in the checkpoint {info.shape}")
        elif info.dtype != str(layout.dtype):
            rounded = path.startswith(PARAMS) and _master(path) in layouts
            if not rounded and not (cast and "key" not in info.dtype + str(layout.dtype)):
                others.append(f"  {path} is {layout.dtype}, in the checkpoint {info.dtype}")
    if not (wrong or others):
        return
    lines = [*wrong, *others]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    mend = (
        "Pass cast=True to convert them."
        if not wrong
        else "It is of another model or optimizer. Weights alone, by name: gshard.export and "
        "gshard.import_params."
    )
    raise GShardError(
        "\n".join(["the checkpoint does not fit the state:", *lines[:_SHOWN], *more, mend])
    )


def check_same_run(stored: Mapping[str, LeafInfo], own: Mapping[str, LeafInfo], where: str) -> None:
    """Refuses to write beside checkpoints whose parameters are others."""
    theirs, mine = _params(stored), _params(own)
    if theirs != mine:
        found = _differing(theirs, mine)
        raise GShardError(
            f"save: {where} holds checkpoints of another model: {'; '.join(found[:5])}. Nothing "
            "was written. Choose another directory."
        )


def _params(leaves: Mapping[str, LeafInfo]) -> dict[str, tuple[int, ...]]:
    return {p: x.shape for p, x in leaves.items() if p.startswith(PARAMS)}


def _differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    found = [f"{p} is missing" for p in theirs if p not in mine]
    found += [f"{p} is added" for p in mine if p not in theirs]
    both = [p for p in theirs if p in mine and theirs[p] != mine[p]]
    return found + [f"{p} has the shape {mine[p]}, there {theirs[p]}" for p in both]


def _source(path: str, layout: Layout, stored: Mapping[str, LeafInfo]) -> str:
    """The stored array that a leaf is read from.

    Either side may have master copies or frozen parameters that the other has not.
    """
    if path.startswith(_FROZEN) and path not in stored:
        return PARAMS + path.removeprefix(_FROZEN)
    if path.startswith(MASTER) and path not in stored:
        return PARAMS + path.removeprefix(MASTER)
    exact = _master(path)
    if path.startswith(PARAMS) and exact in stored:
        info = stored.get(path)
        if info is None or info.dtype != str(layout.dtype):
            return exact
    return path


def _master(path: str) -> str:
    return MASTER + path.removeprefix(PARAMS)


def _one_to_one(sources: Mapping[str, str]) -> Iterable[list[str]]:
    """Leaves in groups in which every source comes once."""
    first: dict[str, str] = {}
    for path, source in sources.items():
        first.setdefault(source, path)
    groups = [list(first.values()), [p for p, s in sources.items() if first[s] != p]]
    return [group for group in groups if group]


def _abstract(layout: Layout, plan: Plan) -> jax.ShapeDtypeStruct:
    """How a leaf is read; keys are read as their data."""
    if not _is_key(layout.dtype):
        return plan.abstract(layout)
    data, _ = _data_of_keys(layout)
    whole = NamedSharding(plan.mesh, jax.P())
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=whole)


def _as_stored(x: Any, layout: Layout, plan: Plan) -> jax.Array:
    if x is None:  # no elements: nothing was written
        empty = jnp.zeros(layout.stored_shape, layout.dtype)
        return jax.device_put(empty, plan.sharding(layout))
    if _is_key(layout.dtype):
        return jax.random.wrap_key_data(x, impl=_data_of_keys(layout)[1])
    return x


def _data_of_keys(layout: Layout) -> tuple[jax.ShapeDtypeStruct, Any]:
    """What keys are written as, abstract, and the generator that they are of."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(layout.shape, layout.dtype))
    return data, found[0]


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x.dtype) else x


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _unreduced(x: Any) -> bool:
    return isinstance(x, Unreduced)
