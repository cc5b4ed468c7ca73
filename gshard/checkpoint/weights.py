"""The weights of a state: its parameters, and the arrays of the collections next to them.

A weight is named by its path, joined by `.`, which is the same at every level, on every mesh and
with every precision. The optimizer's state is none of them, nor are random keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import flatten, same_leaves
from gshard._util.validation import names_of, pattern, shown, warn_of_cut_numbers
from gshard.checkpoint.arrays import ArrayInfo, layouts_of
from gshard.sharding.host_arrays import full_on_host
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.sharding.validate import refuse_abstract, refuse_donated
from gshard.train.optim.made_of_params import layouts_made_of_params, make_of_params
from gshard.train_state import PARAMETERS, Components

_OTHERS = "non_trainable/"
_OF_PARAMETERS = ("params/", "opt_state/", *(f"{_OTHERS}{x}/" for x in PARAMETERS))
_PREFIXES = ("params/", "opt_state/master/", *_OF_PARAMETERS[2:], _OTHERS)


class Weight(NamedTuple):
    """One array as stored, the master copy if there is one, and its layout."""

    array: Any
    layout: Layout


def name_of(layout: Layout) -> str:
    """The name of a weight in a file."""
    return layout.path.replace("/", ".")


def weights_of(components: Components, plan: Plan, call: str) -> dict[str, Weight]:
    """The weights of a state by name, after comparing the state with its plan."""
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
        f"{layout.path} is {x.dtype}{list(x.shape)}, stored as "
        f"{layout.dtype}{list(layout.stored_shape)}"
        for x, layout in weights
        if hasattr(x, "dtype") and (x.dtype != layout.dtype or x.shape != layout.stored_shape)
    ]
    if wrong:
        raise GShardError(
            f"{call}: the arrays of the state do not have the layouts of its plan: "
            f"{some(wrong, most=3)}. Pass what gshard.shard_train_state or a step returned."
        )
    found: dict[str, Weight] = {}
    for weight in weights:
        name = name_of(weight.layout)
        if name in found:
            raise GShardError(
                f"{call}: {found[name].layout.path} and {weight.layout.path} would both be called "
                f"{name!r} in a file. Rename one of them."
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
    is_key = jnp.issubdtype(layout.dtype, jax.dtypes.prng_key)
    return not is_key and layout.path not in random


def chosen(weights: Mapping[str, Weight], only: Any, call: str) -> dict[str, Weight]:
    """The weights whose path contains a match of one of the patterns `only`; all for None."""
    if only is None:
        return dict(weights)
    found: set[str] = set()
    if not (texts := names_of("only", only)):
        raise GShardError(f"{call}: only=[] chooses nothing. Pass a pattern, or None for all.")
    for text in texts:
        regex = pattern(text, "only")
        fits = {name for name, weight in weights.items() if regex.search(weight.layout.path)}
        if not fits:
            paths = some(weight.layout.path for weight in weights.values())
            raise GShardError(f"{call}: only={shown(text)} fits no weight. There are {paths}.")
        warn_of_cut_numbers(f"{call}: only", text, [x.layout.path for x in weights.values()])
        found |= fits
    return {name: weight for name, weight in weights.items() if name in found}


def warn_of_averages(state: Any, plan: Plan, only: Any, call: str) -> None:
    """Warns of arrays with the names and shapes of chosen parameters that are not chosen.

    They are averages of the parameters, as a rule, which would be of other ones from now on.
    """
    wanted = chosen(weights_of(plan.kind.split(state), plan, call), only, call).values()
    shapes = {x.layout.path: x.layout.shape for x in wanted}

    def is_left(path: str, layout: Layout) -> bool:
        if path.startswith(_OF_PARAMETERS) or layout.path in shapes:
            return False
        names = layout.path.split("/")
        ends = ("/".join(names[i:]) for i in range(1, len(names)))
        return any(shapes.get(end) == layout.shape for end in ends)

    if left := [x.path for path, x in layouts_of(plan).items() if is_left(path, x)]:
        warn(
            f"{call}: only= leaves out {some(left)}, with the names and shapes of parameters that "
            "it chooses. If they are averages of these (EMA), they stay those of the old values: "
            "choose them too, or set them to the new parameters."
        )


def parts_to_restore(
    state: Any, plan: Plan, only: Any, stored: Mapping[str, ArrayInfo]
) -> tuple[Mapping[str, ArrayInfo], dict[str, jax.Array]]:
    """What of a checkpoint to restore, and the arrays of a state that stay, both by path.

    `stored` is what the checkpoint says of each array. All of it is restored if `only` is None;
    otherwise the weights that it chooses.
    """
    if only is None:
        return stored, {}
    components = plan.kind.split(state)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(components.params)):
        raise GShardError(
            "restore: only= keeps the other arrays of like=, which has none: it is abstract. Pass "
            "a state with values."
        )
    wanted = chosen(weights_of(components, plan, "restore"), only, "restore")
    own = {weight.layout.path for weight in wanted.values()}
    regexes = [pattern(text, "only") for text in names_of("only", only)]

    def is_chosen(path: str, info: ArrayInfo) -> bool:
        weight = _weight_at(path)
        if weight is None or weight in own:
            return weight is not None
        # What the state lacks is refused, unless it is a count of random numbers or a key.
        is_random = path.startswith(_OTHERS) and not info.dtype.startswith(("float", "bfloat"))
        return not is_random and any(x.search(weight) for x in regexes)

    paths, arrays, _ = flatten(components)
    kept = {p: x for p, x in zip(paths, arrays, strict=True) if _weight_at(p) not in own}
    return {path: info for path, info in stored.items() if is_chosen(path, info)}, kept


def _weight_at(path: str) -> str | None:
    """The path of the weight that is at a path of a state; None for what is none."""
    return next((path.removeprefix(x) for x in _PREFIXES if path.startswith(x)), None)


def with_copies(components: Components, plan: Plan, call: str) -> Components:
    """Replaces the optimizer's copies of the parameters, or warns of them after the first step."""
    copies = layouts_made_of_params(plan)
    if copies == []:
        return components
    if copies is None:
        warn(
            f"{call}: the optimizer's init cannot be traced, so whether its state has copies of "
            "the parameters is not known. If it has, shard (gshard.full_params(state), tx) after "
            "loading; its moments and the step begin again from 0."
        )
        return components
    step = int(full_on_host(components.step, plan.layouts.step))
    if step == 0:
        new = make_of_params(plan, copies, components.params, components.opt_state)
        return dataclasses.replace(components, opt_state=new)
    warn(
        f"{call}: the optimizer's state still belongs to the parameters before this load: "
        f"{some(x.path for x in copies)} (step {step}). The next steps may undo what was loaded. "
        "Load before the first step; or shard (gshard.full_params(state), tx) after loading, with "
        "new moments from step 0."
    )
    return components
