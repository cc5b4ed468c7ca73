"""Converts every accepted form of a loss to one: a sum, its weight, aux and updates.

Auxiliary outputs are kept as sums over micro-batches and calls until they are reduced over devices:
a mean is multiplied by the weight of its examples, a `Weighted` is a sum and a weight. Those of the
global batch are `Weighted`, sums, or the same on all devices (`global_loss.shares`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.arrays import at_least_float32
from gshard._util.errors import ArgumentTypeError, GShardError, did_you_mean, some, warn
from gshard._util.pytree import flatten, path_of, same_leaves
from gshard._util.validation import shown
from gshard.sharding.precision import is_floating
from gshard.train.comm.collectives import reduce_scalar
from gshard.train_state import PureLoss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss, or an auxiliary output, as a sum and its weight.

    With `loss_semantics="per_device"` gshard adds up both over all devices and micro-batches and
    divides once, so that a mean over valid tokens matches single-device training. With `"global"`
    it stands for `sum / weight` of the whole batch. With `"per_micro_batch"` it stands for that of
    each micro-batch, and these are averaged. With either, a loss may return the quotient instead.

    Attributes:
      sum: floating scalar, the loss summed over the examples that the function was given.
      weight: scalar, such as the number of valid tokens. It is not differentiated.

    Example:
      >>> def masked_loss(params, batch):
      ...     error = jnp.square(batch["x"] @ params["w"]).mean(-1)
      ...     return gshard.Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> step = gshard.make_train_step(masked_loss, plan, loss_semantics="per_device")
      >>> state, metrics = step(state, {"x": batch["x"], "mask": np.arange(16) % 3 == 0})
    """

    sum: Any
    weight: Any

    def _refuse(self, *_: Any) -> NoReturn:
        raise ArgumentTypeError(
            "a gshard.Weighted is a pair of a sum and a weight, not a number, and has no "
            "arithmetic. To add x to its mean, return gshard.Weighted(w.sum + x * w.weight, "
            "w.weight); to scale it, gshard.Weighted(x * w.sum, w.weight). With the default "
            "loss_semantics, w.sum / w.weight is an ordinary loss that you can add to others."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __abs__ = _refuse
    __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


Reduction = Literal["sum", "mean", "max", "min", "any", "all"]
REDUCTIONS = get_args(Reduction)
SAME: Any = "same"  # internal: on all devices and in all micro-batches
_SAME_AS: dict[str, Reduction] = {"any": "max", "all": "min"}
_COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, SAME: lambda _, new: new}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reduced:
    """An auxiliary or evaluation output, and how it is reduced over the examples of a batch.

    It applies with `loss_semantics="per_device"` or `"per_micro_batch"`, and over the calls of
    `value_and_grad(sync=False)`. Otherwise the value is that of the whole batch already, and is
    returned as it is.

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
      >>> evaluate = gshard.make_eval_step(count, plan, loss_semantics="per_device")
      >>> int(evaluate(state, batch))
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
    of_global_batch: bool = False  # a plain loss has no weight (None), and aux is not averaged

    def __call__(self, leaves: list[jax.Array], non_trainable: Any, batch: Any, rng: Any) -> Any:
        """Computes the loss of these examples, at least as float32, from full parameter leaves."""
        params = jax.tree.unflatten(self.structure, leaves)
        out, updates = self.loss(params, non_trainable, batch, rng)
        updates = _like_the_non_trainable(updates, non_trainable)
        aux = None
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                many = f" of {len(out)}" if isinstance(out, tuple) else ""
                what = (
                    f"an array of shape {np.shape(out)}"
                    if is_numeric(out)
                    else f"a {type(out).__name__}"
                )
                raise GShardError(
                    "has_aux=True: the loss must return (loss, aux), with all that is auxiliary in "
                    f"aux; it returned {what}{many}."
                )
            out, aux = out
        if isinstance(out, tuple):
            raise GShardError(
                "the loss returned a tuple: pass has_aux=True for (loss, aux), or mutable= for "
                "(loss, updates). backward of a wrapped model takes neither: return the loss alone."
            )
        plain = not isinstance(out, Weighted)
        total, weight = (out, jnp.ones((), jnp.float32)) if plain else (out.sum, out.weight)
        for name, x in (("loss", total), ("weight", weight)):
            if not is_numeric(x):
                hint = " Return (loss, aux) with has_aux=True." if isinstance(x, Mapping) else ""
                raise GShardError(
                    f"the {name} must be a floating scalar; the function returned {shown(x)}.{hint}"
                )
            if jnp.shape(x) != ():
                raise GShardError(
                    f"the {name} must be a scalar; it has shape {jnp.shape(x)}. Return the mean "
                    "over the examples, or gshard.Weighted(sum, weight)."
                )
        if not jnp.issubdtype(jnp.result_type(total), jnp.floating):
            raise GShardError(f"the loss must be floating; it is {jnp.result_type(total)}.")
        _check_aux(aux, None if self.of_global_batch else batch)
        total = at_least_float32(total)
        if plain and self.of_global_batch:
            return total, (None, aux, updates)
        if plain and self.by_examples:
            weight = _examples(batch)
            total = total * weight
        weight = jax.lax.stop_gradient(at_least_float32(weight))
        return total, (weight, aux, updates)


def has_reduction(x: Any) -> bool:
    """Whether this specifies its own reduction, for `is_leaf=`."""
    return isinstance(x, (Weighted, Reduced))


def is_numeric(x: Any) -> bool:
    """Whether this is a scalar or an array of a numeric or boolean dtype."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, (bool, int, float, complex)) or hasattr(x, "dtype")


def check_reductions(tree: Any, batch: Any, what: str) -> list[tuple[str, Any]]:
    """Refuses invalid `Reduced` outputs; returns the paths and values of all other outputs.

    `batch` is None for the global batch, of which entries per example may be returned.
    """
    others = []
    for keys, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_reduction)[0]:
        path = path_of(keys)
        if not isinstance(x, Reduced):
            others.append((path, x))
            continue
        place = f"{what} {path!r}"
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
            wanted = "booleans, such as x > 0" if len(kinds) == 1 else "real numbers"
            raise GShardError(f"{place}: gshard.Reduced(x, {x.by!r}) needs {wanted}; x is {dtype}.")
        _warn_of_entries_per_example(place, x.value, batch)
    return others


def _examples(batch: Any) -> int:
    return next((jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 0)


def _check_aux(aux: Any, batch: Any) -> None:
    """Refuses auxiliary outputs that can be neither averaged nor reduced as they specify.

    `batch` is None for the global batch, of which nothing is averaged.
    """
    for path, x in check_reductions(aux, batch, "aux"):
        if isinstance(x, Weighted):
            if not is_numeric(x.sum) or not is_numeric(x.weight) or jnp.ndim(x.weight):
                raise GShardError(
                    f"aux {path!r}: a gshard.Weighted needs numbers, and a scalar weight."
                )
            continue
        if is_numeric(x) and batch is None:
            continue
        if not is_numeric(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            what = f"has dtype {jnp.result_type(x)}" if is_numeric(x) else f"is {shown(x)}"
            raise GShardError(f"aux {path!r} {what}: {_AUX if batch is None else _AVERAGED_AUX}")
        _warn_of_entries_per_example(f"aux {path!r}", x, batch)


_AUX = "return numbers and arrays."
_AVERAGED_AUX = (
    "only floating auxiliary outputs are averaged over the batch. For other numbers choose a "
    'reduction, such as gshard.Reduced(x, "sum"); leave out everything that is not numeric.'
)


def _warn_of_entries_per_example(place: str, x: Any, batch: Any) -> None:
    examples = 0 if batch is None else _examples(batch)
    if jnp.ndim(x) and jnp.shape(x)[0] == examples > 1:
        warn(
            f"{place} has shape {jnp.shape(x)}, and a device processes {examples} examples at a "
            "time. If it has one entry per example, entries of unrelated examples are combined: "
            "reduce them first (to their mean or sum), or return them from gshard.make_eval_step, "
            "which keeps them. Otherwise ignore this warning."
        )


def _like_the_non_trainable(
    updates: dict[str, Any], non_trainable: dict[str, Any]
) -> dict[str, Any]:
    """Checks the updates that the loss returns, and gives them the tree structure of the state."""
    fitting = {}
    for name, tree in updates.items():
        if name not in non_trainable:
            raise GShardError(
                f"the loss returns new values of {name!r}, which is not a field of the state (its "
                f"further fields: {some(sorted(non_trainable)) or 'none'}). Add the field before "
                "shard_train_state; or leave it out of mutable=, and return what you need of it in "
                "aux (has_aux=True)."
            )
        paths, old, structure = flatten(non_trainable[name])
        advice = (
            "Return the new value of this field alone: of what model.apply(..., mutable=...) "
            f"returned that is new[{name!r}]."
        )
        same_leaves(tree, paths, f"what the loss returns as {name!r} is", advice)
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


def as_sums(aux: Any, weight: Any) -> Any:
    """Converts the aux of examples that weigh `weight` (float32 scalar) to sums that add up."""

    def total(x: Any) -> Any:
        if isinstance(x, Weighted):
            return Weighted(at_least_float32(x.sum), at_least_float32(x.weight))
        if not isinstance(x, Reduced):
            return _weighed(x, weight)
        value = jnp.asarray(x.value)
        if x.by == "mean":
            return _weighed(value, weight)
        if x.by in ("sum", SAME):
            return Reduced(_wide(value) if x.by == "sum" else value, x.by)
        return Reduced(value, _SAME_AS.get(x.by, x.by))

    return jax.tree.map(total, aux, is_leaf=has_reduction)


def neutral_sums(sums: Any) -> Any:
    """Returns the neutral element: adding it to `sums` (concrete or abstract) changes nothing."""

    def empty(x: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x)
        return Reduced(jnp.full(x.value.shape, _neutral(x), x.value.dtype), x.by)

    return jax.tree.map(empty, sums, is_leaf=has_reduction)


def add_sums(sums: Any, more: Any) -> Any:
    """Adds two trees of sums of the same structure."""

    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Reduced):
            return jax.tree.map(jnp.add, x, y)
        return Reduced(_COMBINE[x.by](x.value, y.value), x.by)

    return jax.tree.map(both, sums, more, is_leaf=has_reduction)


def reduce_sums(sums: Any, weight: Any, axes: Sequence[str]) -> Any:
    """Reduces sums over all devices, inside a `shard_map`; `weight` is that of the global batch."""

    def end(x: Any) -> jax.Array:
        if isinstance(x, Weighted):
            return reduce_scalar(x.sum, axes) / reduce_scalar(x.weight, axes)
        if isinstance(x, Reduced):
            return x.value if x.by == SAME else reduce_scalar(x.value, axes, x.by)
        return reduce_scalar(x, axes) / weight

    return jax.tree.map(end, sums, is_leaf=has_reduction)


def _weighed(x: Any, weight: Any) -> jax.Array:
    """Converts a mean to a sum; a mean of weight 0 counts as 0, even if it is NaN (0 / 0)."""
    return jnp.where(weight == 0, 0, x * weight)


def _wide(x: jax.Array) -> jax.Array:
    """Casts to the dtype of a sum: as `jnp.sum` for integers and booleans, at least float32."""
    if is_floating(x.dtype):
        return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return jnp.sum(x, axis=())


def _neutral(x: Reduced) -> Any:
    dtype = x.value.dtype
    if x.by in ("sum", SAME):
        return 0
    if dtype == jnp.bool_:
        return x.by == "min"
    if is_floating(dtype):
        return jnp.inf if x.by == "min" else -jnp.inf
    return jnp.iinfo(dtype).max if x.by == "min" else jnp.iinfo(dtype).min
