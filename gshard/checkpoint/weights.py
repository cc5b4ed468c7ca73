"""The weights of a state: its parameters, and the arrays of the collections next to them.

A weight is named by its path, joined by `.`, which is the same at every level, on every mesh and
with every precision. The optimizer's state is none of them, nor are random keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import flatten, same_leaves
from gshard._util.validation import names_of, pattern, warn_of_cut_numbers
from gshard.checkpoint.arrays import (
    FIELDS,
    FIELDS_OF_PARAMETERS,
    ArrayInfo,
    layouts_of,
    refuse_misfits,
    weight_at,
)
from gshard.sharding.host_arrays import full_on_host
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.sharding.validate import refuse_abstract, refuse_donated
from gshard.train.optim.made_of_params import layouts_made_of_params, make_of_params
from gshard.train_state import Components

T = TypeVar("T")


class Weight(NamedTuple):
    """One array as stored, the master copy if there is one, and its layout."""

    array: Any
    layout: Layout


def name_of(layout: Layout) -> str:
    """The name of a weight in a file."""
    return layout.path.replace("/", ".")


def weights_of(components: Components, plan: Plan, call: str) -> list[Weight]:
    """The weights of a state, after comparing the state with its plan."""
    same_leaves(components.params, flatten(plan.params)[0], f"{call}: the state is")
    same_leaves(components.non_trainable, flatten(plan.non_trainable)[0], f"{call}: the state is")
    leaves = jax.tree.leaves((components.params, components.non_trainable, components.opt_state))
    refuse_abstract(leaves)
    refuse_donated(leaves)
    params, layouts = plan.master_params(components.params, components.opt_state)
    arrays = jax.tree.leaves(params) + jax.tree.leaves(components.non_trainable)
    others, random = jax.tree.leaves(plan.non_trainable), plan.kind.random_paths(plan.template)
    pairs = zip(arrays, jax.tree.leaves(layouts) + others, strict=True)
    weights = [Weight(x, layout) for x, layout in pairs if _is_weight(layout, random)]
    wrong = [
        (layout.path, x, layout)
        for x, layout in weights
        if hasattr(x, "dtype") and (x.dtype != layout.dtype or x.shape != layout.stored_shape)
    ]
    refuse_misfits(wrong, call)
    return weights


def named(weights: Iterable[Weight], call: str) -> dict[str, Weight]:
    """The weights by the names that they have in a file."""
    found: dict[str, Weight] = {}
    for weight in weights:
        name = name_of(weight.layout)
        if name in found:
            raise GShardError(
                f"{call}: {found[name].layout.path} and {weight.layout.path} would both be called "
                f"{name!r} in the file. Rename one of them."
            )
        found[name] = weight
    return found


def replace_weights(
    components: Components, plan: Plan, make: Callable[[str, Layout, Any], Any]
) -> Components:
    """The components with each weight and master copy replaced by `make(name, layout, it)`."""
    random = plan.kind.random_paths(plan.template)

    def replace_in(tree: Any, layouts: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        layouts = jax.tree.leaves(layouts)
        new = [
            make(name_of(layout), layout, x) if _is_weight(layout, random) else x
            for x, layout in zip(leaves, layouts, strict=True)
        ]
        return jax.tree.unflatten(structure, new)

    had = components.opt_state.master
    master = {path: make(name_of(x), x, had[path]) for path, x in plan.master.items()}
    return dataclasses.replace(
        components,
        params=replace_in(components.params, plan.params),
        opt_state=components.opt_state._replace(master=master),
        non_trainable=replace_in(components.non_trainable, plan.non_trainable),
    )


def _is_weight(layout: Layout, random: frozenset[str]) -> bool:
    return not is_key(layout) and layout.path not in random


def chosen(weights: Mapping[str, Weight], only: Any, call: str) -> dict[str, Weight]:
    """The weights whose path contains a match of one of the patterns `only`; all for None."""
    if only is None:
        return dict(weights)
    found: set[str] = set()
    if not (patterns := _patterns(only, call)):
        raise GShardError(f"{call}: only=[] chooses nothing. Pass a pattern, or None for all.")
    for regex in patterns:
        fits = {name for name, weight in weights.items() if regex.search(weight.layout.path)}
        if not fits:
            paths = some(weight.layout.path for weight in weights.values())
            raise GShardError(
                f"{call}: only={regex.pattern!r} matches no weight. There are {paths}."
            )
        found |= fits
    return {name: weight for name, weight in weights.items() if name in found}


def _patterns(only: Any, call: str) -> list[re.Pattern[str]]:
    texts = names_of(f"{call}: only", only, "a regular expression as a string")
    return [pattern(text, f"{call}: only=") for text in texts]


def chooser(only: Any, call: str) -> Callable[[str], bool]:
    """A function: whether the path of a weight contains a match of one of the patterns `only`."""
    patterns = _patterns(only, call)
    return lambda weight: any(x.search(weight) for x in patterns)


def warn_of_choice(plan: Plan, only: Any, call: str) -> None:
    """Warns of patterns that match more than they seem to, and of averages that they leave out.

    Averages of the parameters have their names and shapes, in a field of their own. If they are
    left out, they are those of other parameters from now on.
    """
    params, fields = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for path, layout in layouts_of(plan).items():
        if (weight := weight_at(path)) is not None:
            is_field = path.startswith(FIELDS) and not path.startswith(FIELDS_OF_PARAMETERS)
            (fields if is_field else params)[weight] = layout.shape
    texts = [x.pattern for x in _patterns(only, call)]
    warn_of_cut_numbers(f"{call}: only", texts, [*params, *fields])
    is_chosen = chooser(only, call)
    left: list[str] = []
    below = _subtrees(fields)
    for prefix, own in _subtrees(params).items():
        if len(own) < len(params):
            continue  # what is below is a part of the parameters
        for place, tree in below.items():
            if tree == own:
                left += [place + x for x in tree if is_chosen(prefix + x)]
    if left := [x for x in dict.fromkeys(left) if not is_chosen(x)]:
        warn(
            f"{call}: only= chooses parameters, but not {some(left)}, which have the same names "
            "and shapes. If they are averages of the parameters (EMA), they are still averages of "
            "the old ones: add them to only=, or copy the new parameters into them."
        )


def _subtrees(shapes: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """What is below each prefix of the paths, such as `ema/`, and below the empty one."""
    found: dict[str, dict[str, T]] = {}
    for path, shape in shapes.items():
        names = path.split("/")
        for i in range(len(names)):
            prefix = "".join(f"{name}/" for name in names[:i])
            found.setdefault(prefix, {})[path.removeprefix(prefix)] = shape
    return found


def parts_to_restore(
    state: Any, plan: Plan, only: Any, stored: Mapping[str, ArrayInfo]
) -> tuple[Mapping[str, ArrayInfo], dict[str, jax.Array]]:
    """Which arrays of a checkpoint to restore, and the arrays of a state that stay, both by path.

    `stored` is what the checkpoint says of each array. All of it is restored if `only` is None;
    otherwise the weights that it chooses.
    """
    if only is None:
        return stored, {}
    components = plan.kind.split(state)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(components.params)):
        raise GShardError(
            "restore: only= keeps the other arrays of like=, but an abstract like= has no arrays. "
            "Pass a state with values."
        )
    weights = {x.layout.path: x for x in weights_of(components, plan, "restore")}
    own, fits = chosen(weights, only, "restore"), chooser(only, "restore")

    def is_chosen(path: str) -> bool:
        weight = weight_at(path)
        if weight is None or weight in own:
            return weight is not None
        # What the state lacks is an error later on, but for generators of random numbers.
        return not _is_random(path, stored) and fits(weight)

    paths, arrays, _ = flatten(components)
    kept = {p: x for p, x in zip(paths, arrays, strict=True) if weight_at(p) not in own}
    return {path: info for path, info in stored.items() if is_chosen(path)}, kept


def _is_random(path: str, stored: Mapping[str, ArrayInfo]) -> bool:
    """Whether a stored array is a key, or the counter beside one."""
    beside = stored.get(path.removesuffix("/count") + "/key")
    return any(x is not None and x.dtype.startswith("key<") for x in (stored[path], beside))


def with_copies(components: Components, old: Components, plan: Plan, call: str) -> Components:
    """Replaces the optimizer's copies of the parameters, or warns of them after the first step."""
    pairs = zip(*(jax.tree.leaves(x.params) for x in (components, old)), strict=True)
    if all(x is y for x, y in pairs):
        return components
    copies = layouts_made_of_params(plan)
    if copies == []:
        return components
    if copies is None:
        warn(
            f"{call}: the optimizer's init cannot be traced, so whether its state has copies of "
            "the parameters is not known. If it has, shard (gshard.full_params(state), tx) "
            "afterwards; its moments and the step begin again from 0."
        )
        return components
    step = int(full_on_host(components.step, plan.layouts.step))
    if step == 0:
        new = make_of_params(plan, copies, components.params, components.opt_state)
        return dataclasses.replace(components, opt_state=new)
    warn(
        f"{call}: the optimizer's state still has copies of the earlier parameters: "
        f"{some(x.path for x in copies)} (step {step}). The next steps may undo what was read. "
        "Read weights before the first step; or shard (gshard.full_params(state), tx) afterwards, "
        "with new moments from step 0."
    )
    return components
