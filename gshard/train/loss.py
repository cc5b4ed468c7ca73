"""Converts every accepted form of a loss to one: a sum, its weight, aux and updates."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.pytree import flatten, path_of, same_leaves
from gshard._util.validation import shown
from gshard.train_state import PureLoss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss, or an auxiliary output, as a sum and its weight.

    gshard adds up both over all devices and micro-batches and divides once, so that a mean over
    valid tokens matches single-device training.

    Attributes:
      sum: floating scalar, the loss summed over the examples that the function was given.
      weight: scalar, such as the number of valid tokens. It is not differentiated.

    Example:
      >>> def masked_loss(params, batch):
      ...     error = jnp.square(batch["x"] @ params["w"]).mean(-1)
      ...     return gshard.Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> step = gshard.make_train_step(masked_loss, plan)
      >>> state, metrics = step(state, {"x": batch["x"], "mask": np.arange(16) % 3 == 0})
    """

    sum: Any
    weight: Any


Reduction = Literal["sum", "mean", "max", "min", "any", "all"]
REDUCTIONS = get_args(Reduction)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reduced:
    """An auxiliary or evaluation output, and how it is reduced over the examples of a batch.

    Attributes:
      value: scalar or array computed from the examples that the function was given, such as their
        count or their largest logit.
      by: the reduction over devices, micro-batches and calls: `"sum"`, `"max"`, `"min"`, `"any"`
        and `"all"` (of booleans), or `"mean"` (weighted as the loss is; in evaluation every device
        weighs the same). Integers stay integers, except in a mean. A sum of them has the dtype of
        `jnp.sum`, and a sum of float16 or bfloat16 is float32.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> count = lambda params, batch: gshard.Reduced(batch["x"].shape[0], "sum")
      >>> int(gshard.make_eval_step(count, plan)(state, batch))
      16
    """

    value: Any
    by: Reduction = field(metadata={"static": True})


@dataclass(frozen=True)
class NormalizedLoss:
    """Calls a pure loss and converts its result to `(sum, (weight, aux, updates))`."""

    loss: PureLoss
    structure: Any
    has_aux: bool
    by_examples: bool  # whether a plain loss weighs its number of examples; otherwise it weighs 1

    def __call__(self, leaves: list[jax.Array], non_trainable: Any, batch: Any, rng: Any) -> Any:
        """Computes the loss of one device's examples, as float32, from full parameter leaves."""
        params = jax.tree.unflatten(self.structure, leaves)
        out, updates = self.loss(params, non_trainable, batch, rng)
        updates = _like_the_non_trainable(updates, non_trainable)
        aux = None
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise GShardError(
                    f"has_aux=True: the loss must return (loss, aux); it returned a "
                    f"{type(out).__name__}."
                )
            out, aux = out
        plain = not isinstance(out, Weighted)
        if plain:
            if isinstance(out, tuple):
                raise GShardError(
                    "the loss returned a tuple: pass has_aux=True for (loss, aux), or mutable= for "
                    "(loss, updates)."
                )
            out = Weighted(out, jnp.ones((), jnp.float32))
        for name, x in (("loss", out.sum), ("weight", out.weight)):
            if not is_numeric(x):
                raise GShardError(
                    f"the {name} must be a floating scalar; the function returned {shown(x)}."
                )
            if jnp.shape(x) != ():
                raise GShardError(
                    f"the {name} must be a scalar; it has shape {jnp.shape(x)}. Return the mean "
                    "over the rows, or gshard.Weighted(sum, weight)."
                )
        if not jnp.issubdtype(jnp.result_type(out.sum), jnp.floating):
            raise GShardError(f"the loss must be floating; it is {jnp.result_type(out.sum)}.")
        _check_aux(aux, batch)
        if plain and self.by_examples:
            rows = _rows(batch)
            out = Weighted(jnp.asarray(out.sum, jnp.float32) * rows, rows)
        weight = jax.lax.stop_gradient(jnp.asarray(out.weight, jnp.float32))
        return jnp.asarray(out.sum, jnp.float32), (weight, aux, updates)


def fold_keys(tree: Any, *numbers: Any) -> Any:
    """Folds every typed PRNG key of a tree with `numbers`, such as device and micro-batch."""

    def fold(x: Any) -> Any:
        if not _is_key(x):
            return x
        flat = x.reshape(-1)
        for number in numbers:
            flat = jax.vmap(jax.random.fold_in, (0, None))(flat, number)
        return flat.reshape(x.shape)

    return jax.tree.map(fold, tree)


def fold_raw_key(key: jax.Array, *numbers: Any) -> jax.Array:
    """Folds an old-style key (uint32), or an array of them, with `numbers`."""
    return jax.random.key_data(fold_keys(jax.random.wrap_key_data(key), *numbers))


def fold_scalar_keys(batch: Any, *numbers: Any) -> Any:
    """Folds the typed keys of a batch that are replicated; keys with one per example stay."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else fold_keys(x, *numbers), batch)


def refuse_keys(updates: Any, raw: Set[str] = frozenset()) -> None:
    """Refuses PRNG keys that the loss changes: they would differ from device to device.

    Args:
      updates: the non-trainable state that the loss changed.
      raw: paths of arrays that are used as old-style keys.

    Raises:
      GShardError: names the keys.
    """
    paths, leaves, _ = flatten(updates)
    keys = [path for path, x in zip(paths, leaves, strict=True) if _is_key(x) or path in raw]
    if keys:
        raise GShardError(
            f"the loss changes the PRNG key {some(keys)}, which would differ from device to "
            "device. Linen: pass rng= to make_train_step, which folds it with step, micro-batch "
            "and device. NNX: draw from nnx.Rngs, which counts its draws and keeps its key."
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def has_reduction(x: Any) -> bool:
    """Whether this specifies its own reduction, for `is_leaf=`."""
    return isinstance(x, (Weighted, Reduced))


def is_numeric(x: Any) -> bool:
    """Whether this is a scalar or an array of a numeric or boolean dtype."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, (bool, int, float, complex)) or hasattr(x, "dtype")


def check_reductions(tree: Any, batch: Any, what: str) -> None:
    """Refuses any `Reduced` of a tree with an unknown reduction or a value of the wrong kind.

    Args:
      tree: the outputs.
      batch: the batch that they were computed from.
      what: how the message begins.

    Raises:
      GShardError: names its path.
    """
    rows = _rows(batch)
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_reduction)
    for keys, x in pairs:
        if not isinstance(x, Reduced):
            continue
        place = f"{what} {path_of(keys)!r}"
        if x.by not in REDUCTIONS:
            raise GShardError(
                f"{place}: gshard.Reduced(x, by={shown(x.by)}) is unknown."
                f"{did_you_mean(x.by, REDUCTIONS)} Choose one of {', '.join(REDUCTIONS)}."
            )
        if not is_numeric(x.value):
            raise GShardError(
                f"{place}: gshard.Reduced(x, {x.by!r}) needs a number or an array; x is "
                f"{shown(x.value)}."
            )
        dtype = jnp.result_type(x.value)
        kinds = (jnp.bool_,) if x.by in ("any", "all") else (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            what = "booleans, such as x > 0" if len(kinds) == 1 else "real numbers"
            raise GShardError(f"{place}: gshard.Reduced(x, {x.by!r}) needs {what}; x is {dtype}.")
        _warn_of_rows(place, x.value, rows)


def typed_key(rng: Any) -> Any:
    """Converts `rng=` to a typed key; an old-style key (uint32) of the default kind is wrapped.

    Raises:
      GShardError: it is not a key.
    """
    if rng is None or (isinstance(rng, jax.Array) and _is_key(rng) and not rng.shape):
        return rng
    kind = jnp.shape(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))))
    if getattr(rng, "dtype", None) == jnp.uint32 and jnp.shape(rng) == kind:
        return jax.random.wrap_key_data(jnp.asarray(rng))
    raise GShardError(f"rng={shown(rng)} is not a PRNG key. Pass one, such as jax.random.key(0).")


def _rows(batch: Any) -> int:
    return next((jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 0)


def _check_aux(aux: Any, batch: Any) -> None:
    """Refuses auxiliary outputs that can be neither averaged nor reduced as they specify."""
    check_reductions(aux, batch, "aux")
    pairs, _ = jax.tree_util.tree_flatten_with_path(aux, is_leaf=has_reduction)
    for keys, x in pairs:
        path = path_of(keys)
        if isinstance(x, Reduced):
            continue
        if isinstance(x, Weighted):
            if not is_numeric(x.sum) or not is_numeric(x.weight) or jnp.ndim(x.weight):
                raise GShardError(
                    f"aux {path!r}: a gshard.Weighted needs numbers, and a scalar weight."
                )
            continue
        if not is_numeric(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            what = f"has dtype {jnp.result_type(x)}" if is_numeric(x) else f"is {shown(x)}"
            raise GShardError(
                f"aux {path!r} {what}: only floating auxiliary outputs are averaged over the "
                "batch. For another number say how it is reduced, such as gshard.Reduced(x, "
                '"sum"); leave out what is no number.'
            )
        _warn_of_rows(f"aux {path!r}", x, _rows(batch))


def _warn_of_rows(place: str, x: Any, rows: int) -> None:
    if jnp.ndim(x) and jnp.shape(x)[0] == rows > 1:
        warn(
            f"{place} has shape {jnp.shape(x)}, and a device takes {rows} rows at a time. If it "
            "has one entry for each row, unrelated rows are combined: reduce them first (their "
            "mean, their sum), or take such outputs from gshard.make_eval_step as they are. If "
            "not, all is well."
        )


def _like_the_non_trainable(
    updates: dict[str, Any], non_trainable: dict[str, Any]
) -> dict[str, Any]:
    """Checks the updates that the loss returns, and gives them the tree structure of the state."""
    fitting = {}
    for name, tree in updates.items():
        if name not in non_trainable:
            raise GShardError(
                f"the loss returns {name!r}, and the state has "
                f"{some(sorted(non_trainable)) or 'no'} "
                "further fields. Add it to the state before shard_train_state."
            )
        paths, old, structure = flatten(non_trainable[name])
        same_leaves(tree, paths, f"what the loss returns as {name!r} is")
        for path, x, like in zip(paths, jax.tree.leaves(tree), old, strict=True):
            if jnp.shape(x) != like.shape or jnp.result_type(x) != like.dtype:
                place = f"{name}/{path}" if path else name
                raise GShardError(
                    f"the loss returns {place} as {jnp.result_type(x)}{list(jnp.shape(x))}, and "
                    f"the state has {like.dtype}{list(like.shape)}. It must keep its shape and "
                    "dtype."
                )
        fitting[name] = jax.tree.unflatten(structure, jax.tree.leaves(tree))
    return fitting
