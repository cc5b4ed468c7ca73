"""The arrays of a train state, by paths that are the same at every level and on every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some
from gshard._util.pytree import check_fits, check_unique, differences, flatten
from gshard.checkpoint.casts import can_cast
from gshard.checkpoint.quantized import blocks_of
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.master_copies import latest_copies
from gshard.sharding.plan import Plan, check_state
from gshard.sharding.validate import (
    refuse_abstract,
    refuse_abstract_mesh,
    refuse_donated,
    refuse_traced,
)
from gshard.train.gradients import LocalGradients
from gshard.train.shard_train_state import shard_leaf
from gshard.train_state import FROZEN, PARAMETERS, Components

PARAMS, OPT_STATE, MASTER = "params/", "opt_state/", "opt_state/master/"
FIELDS = "non_trainable/"
FIELDS_OF_PARAMETERS = tuple(f"{FIELDS}{x}/" for x in PARAMETERS)
FROZEN_PARAMS = f"{FIELDS}{FROZEN}/"
WEIGHTS = (MASTER, PARAMS, *FIELDS_OF_PARAMETERS, FIELDS)  # exact ones first


@dataclass(frozen=True)
class ArrayInfo:
    """The logical shape and the name of the dtype of a stored array, such as `key<fry>`.

    Of the codes of a quantized array, `blocks` is the dimension of its blocks, and in how many
    shards that dimension was.
    """

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[int, int] | None = None


def arrays_of(state: Any, plan: Plan) -> tuple[dict[str, jax.Array], dict[str, ArrayInfo]]:
    """Returns a state's non-empty arrays by path, and the `ArrayInfo` of all arrays.

    It refuses donated arrays, and gradients that are not reduced yet.
    """
    refuse_waiting(state)
    components = plan.kind.split(state)
    refuse_traced(jax.tree.leaves(components), "save")
    if any(map(_is_unreduced, jax.tree.leaves(components, is_leaf=_is_unreduced))):
        raise GShardError(
            "save: the state contains LocalGradients, which differ on every device. Reduce them "
            "with gshard.reduce_gradients(acc, plan) and update before you save."
        )
    paths, leaves, _ = flatten(components)
    check_unique(paths, "arrays of the state")
    if nameless := [path for path in paths if path.endswith("/")]:  # Orbax drops the slash
        raise GShardError(
            f"save: the names of {some(nameless)} are empty or end with a slash: they could not "
            "be restored. Rename them; put parameters that are one array into a dict."
        )
    refuse_abstract(leaves)
    refuse_donated(leaves)
    layouts = layouts_of(plan)
    if paths != list(layouts):
        raise GShardError(
            "save: the state is not the one that its plan was made for: "
            f"{differences(paths, list(layouts))}."
        )
    triples = zip(paths, leaves, layouts.values(), strict=True)
    refuse_misfits([x for x in triples if not _can_be_saved(*x)], "save")
    master = latest_copies(plan, components.params, components.opt_state.master)
    own = {f"{MASTER}{path}": x for path, x in master.items()}
    leaves = [own.get(path, x) for path, x in zip(paths, leaves, strict=True)]
    blocks = blocks_of(plan)
    infos = {p: ArrayInfo(x.shape, str(x.dtype), blocks.get(p)) for p, x in layouts.items()}
    placed = [
        x if isinstance(x, jax.Array) else shard_leaf(x, layout, plan)  # a step of Python's
        for x, layout in zip(leaves, layouts.values(), strict=True)
    ]
    pairs = [(path, x) for path, x in zip(paths, placed, strict=True) if np.size(x)]
    return {p: jax.random.key_data(x) if is_key(x) else x for p, x in pairs}, infos


def _can_be_saved(path: str, x: Any, layout: Layout) -> bool:
    """Whether an array has the dtype of its layout, and its shape with or without padding.

    An optimizer may change the dtype of its state, but not from integers to floats: a restore could
    not give them back. JAX stores NumPy's 64-bit numbers in 32 bits, unless jax_enable_x64 is on.
    """
    if not hasattr(x, "dtype"):
        check_fits(x, layout.dtype, f"save: {path}")
        has_dtype = _is_exact(x, layout.dtype)
    else:
        dtype = x.dtype if is_key(x) else canonicalize_dtype(x.dtype)
        is_free = not path.startswith((PARAMS, MASTER, *FIELDS_OF_PARAMETERS)) and path != "step"
        if not isinstance(x, jax.Array):
            is_free = path.startswith(OPT_STATE) and jnp.issubdtype(dtype, jnp.floating)
        has_dtype = dtype == layout.dtype or (is_free and can_cast(dtype, layout.dtype))
    return has_dtype and np.shape(x) in (layout.shape, layout.stored_shape)


def _is_exact(number: Any, dtype: Any) -> bool:
    """Whether a number of Python, such as a step, becomes an array of this dtype unchanged.

    Floats are rounded, as they are everywhere.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return isinstance(number, int)
    return not isinstance(number, complex) or jnp.issubdtype(dtype, jnp.complexfloating)


def refuse_misfits(wrong: Sequence[tuple[str, Any, Layout]], call: str) -> None:
    """Raises a `GShardError` if any arrays, by path, differ from their layouts."""
    if wrong:
        found = (
            f"{path} is {getattr(x, 'dtype', type(x).__name__)}{[*np.shape(x)]}, stored as "
            f"{layout.dtype}{[*layout.stored_shape]}"
            for path, x, layout in wrong
        )
        raise GShardError(
            f"{call}: the arrays of the state do not have the layouts of its plan: "
            f"{some(found, most=3)}. Pass what gshard.shard_train_state or a step returned; for "
            "other shapes or dtypes, shard the new parameters."
        )


def refuse_waiting(state: Any) -> None:
    """Refuses a wrapped model that keeps gradients which are not reduced yet."""
    for owner in state if isinstance(state, tuple) else ():
        if hasattr(owner, "_gshard_refuse_waiting"):
            owner._gshard_refuse_waiting()


def layouts_of(plan: Plan) -> dict[str, Layout]:
    """Returns the layouts of a state's arrays, by path."""
    return dict(zip(*flatten(plan.layouts)[:2], strict=True))


def state_and_plan(like: Any, call: str) -> tuple[Any, Plan]:
    """Returns the state and the plan to restore into: `like` is both, or one of them."""
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], Plan):
        state, plan = like
        check_state(state, plan, call)
    elif isinstance(like, Plan):
        state, plan = like.abstract_state(), like
    elif like is None:
        raise GShardError(
            f"{call} was given no like=: pass the state that gshard.shard_train_state returned, or "
            "its plan, which says where to place each array."
        )
    else:
        state, plan = like, plan_of(like, call)
    refuse_traced(jax.tree.leaves(plan.kind.split(state)), call)
    refuse_abstract_mesh(plan.mesh, call)
    return state, plan


def with_components(components: Components, state: Any, plan: Plan) -> Any:
    """A state like `state` with these components; a concrete NNX pair is changed in place."""
    own = plan.kind.split(state)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(own))
    if abstract or getattr(plan.kind.tx(state), "plan", None) is not plan:
        static = plan.kind.split(plan.template).static
        return plan.kind.merge(
            dataclasses.replace(components, static=static), state, plan.optimizer
        )
    new = plan.kind.update(state, dataclasses.replace(components, static=own.static))
    return state if new is None else new


def weight_at(path: str) -> str | None:
    """The path of the weight that an array of a state is; None for what is none."""
    return next((path.removeprefix(x) for x in WEIGHTS if path.startswith(x)), None)


def _is_unreduced(x: Any) -> bool:
    return isinstance(x, LocalGradients)
