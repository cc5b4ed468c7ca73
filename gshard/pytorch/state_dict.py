"""Matches loaded optimizer states, and the leaves of a state, with the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, some
from gshard._util.pytree import belongs_to, flatten
from gshard._util.validation import shown
from gshard.wrapped.state_dict import misfit


def matched(states: Any, wanted: Sequence[Any]) -> list[Any]:
    """Returns the state of each group in the tree of the abstract state that is wanted.

    `states` are trees with the same paths, or what a file made of them.
    """
    states = entries(states, len(wanted))
    if not isinstance(states, Sequence) or len(states) != len(wanted):
        raise GShardError(
            f"load_state_dict: {shown(states)} are not the states of {len(wanted)} groups. Pass "
            "what state_dict() returned, or the state of a plain optimizer. Nothing was changed."
        )
    found, missing, unknown, wrong = [], [], [], []
    for g, (state, like) in enumerate(zip(states, wanted, strict=True)):
        given = dict(zip(*flatten(state)[:2], strict=True))
        paths, leaves, structure = flatten(like)
        prefix = f"{g}: " if len(wanted) > 1 else ""
        missing += [prefix + path for path in paths if path not in given]
        unknown += [prefix + path for path in given if path not in paths]
        for path, x in zip(paths, leaves, strict=True):
            if path in given and (says := _wrong(given[path], x)):
                wrong.append(f"{prefix}{path} {says}")
        found.append(structure.unflatten([given.get(path) for path in paths]))
    lists = {"missing ": missing, "unknown ": unknown, "": wrong}
    if what := "; ".join(words + some(names) for words, names in lists.items() if names):
        hint = ""
        if all(path.endswith("/count") for path in unknown) and not (missing or wrong):
            hint = (
                " The saved learning rate was a schedule, whose state has a step count. To load it "
                "with a fixed rate, make the optimizer with lr=optax.constant_schedule(1e-3)."
            )
        raise GShardError(f"load_state_dict: {what}.{hint} Nothing was changed.")
    return found


def _wrong(value: Any, like: Any) -> str:
    """Returns a readable message of what is wrong with a value; empty if nothing is."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        same = getattr(value, "dtype", None) == like.dtype and value.shape == like.shape
        return "" if same else "is not a key of the same kind"
    return misfit(value, like.shape, like.dtype)


def entries(given: Any, count: int) -> Any:
    """Returns a list, also from the mapping "0", "1", ... that `save` made of it before 0.1."""
    if isinstance(given, Mapping) and {*given} <= {str(i) for i in range(count)}:
        return [given.get(str(i), {}) for i in range(count)]
    return given


def refuse_other_shards(shards: Any, wanted: Sequence[Any]) -> None:
    """Refuses local shards of a state that was sharded differently, or of another process."""
    if not isinstance(shards, Sequence) or not all(
        isinstance(x, Mapping)
        for group in shards
        for x in (group, *(group.values() if isinstance(group, Mapping) else ()))
    ):
        raise GShardError(
            f"load_state_dict: shards={shown(shards)} are not what state_dict(full=False) returned."
        )

    def shapes(groups: Sequence[Any]) -> dict[str, Any]:
        return {
            f"{g}: {path} {index}": np.shape(x)
            for g, group in enumerate(groups)
            for path, each in group.items()
            for index, x in each.items()
        }

    given, own = shapes(shards), shapes(wanted)
    differ = [name for name in given | own if given.get(name) != own.get(name)]
    if differ:
        raise GShardError(
            "load_state_dict: these are shards of a state that was sharded differently, or of "
            f"another process: {some(differ, most=3)}. Nothing was changed. A full state, from "
            "state_dict(), can be loaded on any number of devices."
        )


def parameter_of(tree: Any, params: Any) -> list[int | None]:
    """Returns the position of the parameter of each leaf of a state, or None.

    A leaf belongs to the parameter whose path its own path ends in, if every parameter has such a
    leaf, or if shapes are equal: a step count does not belong to a parameter named `count`.
    """
    names, params, _ = flatten(params)
    at = {name: i for i, name in enumerate(names)}
    paths, leaves, _ = flatten(tree)
    ends = belongs_to(paths, at)
    counts = Counter(end[0] for end in ends if end is not None)
    found: list[int | None] = []
    for end, x in zip(ends, leaves, strict=True):
        i = None if end is None else at[end[1]]
        if end is not None and i is not None and counts[end[0]] < len(names):
            i = i if x.shape and x.shape == params[i].shape else None
        found.append(i)
    return found


def with_zeros(grads: Sequence[Any], skipped: Sequence[int], params: Sequence[Any]) -> list[Any]:
    """Returns the gradients of all parameters, with zeros for the skipped ones (ascending)."""
    found = list(grads)
    for i in skipped:
        found.insert(i, jnp.zeros(params[i].shape, params[i].dtype))
    return found


def keep_of(of: Sequence[int | None], skipped: Collection[int], new: Any, old: Any) -> Any:
    """Returns `new`, with `old` leaves for skipped parameters; `of` gives each leaf's parameter."""
    leaves, structure = jax.tree.flatten(new)
    pairs = zip(of, leaves, jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(structure, [y if i in skipped else x for i, x, y in pairs])
