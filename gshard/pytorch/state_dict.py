"""Matches loaded optimizer states, and the leaves of a state, with the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some
from gshard._util.pytree import belongs_to, flatten
from gshard._util.validation import shown
from gshard.distributed.agree import spans_processes
from gshard.sharding.plan import Plan
from gshard.wrapped.state_dict import misfit, refuse_different


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


def compare(states: Sequence[Any], wanted: Sequence[Any], plan: Plan) -> None:
    """Refuses full states that differ between the processes: each takes its shards from its own."""
    if not spans_processes(plan):
        return
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(states)]
    likes = zip(flatten(wanted)[0], jax.tree.leaves(wanted), leaves, strict=True)
    mesh: Any = plan.mesh
    refuse_different(
        ((path, np.asarray(x, None if is_key(like) else like.dtype)) for path, like, x in likes),
        mesh,
    )


def placed(arrays: Any, shardings: Any, what: str) -> Any:
    """Places arrays on the devices of an optimizer; with several processes they must be equal."""
    try:
        with jax.disable_jit(False):  # else JAX fails at the comparison
            # Copies, since JAX may use NumPy's memory as it is, which the caller may fill again.
            own = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, arrays)
            return jax.device_put(own, shardings)
    except AssertionError as error:  # of JAX, which compares the values of the processes
        raise GShardError(
            f"step: {what} differ between the processes, and each updates its own shards. Give "
            "the same on all of them: gradients that are averaged over the processes, as "
            "gshard.value_and_grad(loss_fn, opt.plan) and the backward of a "
            "DistributedDataParallel do."
        ) from error


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
    """Returns `new`, with `old` leaves for skipped parameters; `of` gives each leaf's parameter.

    Groups may be given in place of parameters.
    """
    leaves, structure = jax.tree.flatten(new)
    pairs = zip(of, leaves, jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(structure, [y if i in skipped else x for i, x, y in pairs])
