"""Rules, which decide the dimension of a leaf that is sharded.

A rule is a pure function `LeafInfo -> ShardDim | None`. None leaves the decision to the next rule.
Rules by path or predicate come first, the rule by shape last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from gshard._util import validation
from gshard._util.errors import GShardError, did_you_mean, place_of, some, warn
from gshard._util.pytree import check_unique, differences, flatten
from gshard._util.validation import check_integer, check_takes, dimension, shown
from gshard.train_state import SCAN_NAMES

REPLICATE = "replicate"


@dataclass(frozen=True)
class LeafInfo:
    """The properties of one array of the train state that a rule decides by.

    Attributes:
      path: keys joined by `/`, such as `Dense_0/kernel`.
      shape: logical shape.
      dtype: NumPy or JAX dtype.
      scan_dim: the dimension that a scan over layers iterates over, or None. `by_shape` never
        shards it; your own rule may where `params_replicated`.
      shards: number of devices in the shard group (N).
      taken: dimensions that are sharded over your own model-parallel axes, or over the axis that
        the array is kept on. No rule shards them.
      params_replicated: the parameter itself is replicated (`os`, `os_g`); only its gradient and
        its optimizer state are sharded.

    Example:
      >>> def rule(leaf: gshard.LeafInfo):
      ...     return "replicate" if len(leaf.shape) == 1 else None
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", rules=rule, min_shard_size=0)
      >>> plan.params["w"].dim, plan.params["b"].dim
      (0, None)
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    scan_dim: int | None
    shards: int
    taken: frozenset[int] = frozenset()
    params_replicated: bool = False

    @property
    def layer_size(self) -> int:
        """Number of elements of one layer, or of the array if it is not stacked."""
        layers = 1 if self.scan_dim is None else max(1, self.shape[self.scan_dim])
        return math.prod(self.shape) // layers


@dataclass(frozen=True)
class ShardDim:
    """What a rule decides for one array.

    Attributes:
      dim: the dimension to shard; None replicates the array.
      reason: why, for the table of the plan.

    Example:
      >>> def rule(leaf):
      ...     return gshard.ShardDim(0, "rows of the table") if leaf.path == "w" else None
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", rules=rule)
      >>> plan.params["w"].reason
      'rows of the table'
    """

    dim: int | None
    reason: str


Rule = Callable[[LeafInfo], ShardDim | None]


def by_shape(min_shard_size: int = 2**14, indivisible: Literal["pad", "replicate"] = "pad") -> Rule:
    """Makes the default rule: it shards every array with more than `min_shard_size` elements.

    It prefers a dimension that is divisible by the number of devices. Among those it chooses one
    whose local size fills hardware tiles (16 rows, 128 columns on TPU), then the leading one, whose
    shards are contiguous.

    Args:
      min_shard_size: elements of one layer; an array with at most this many is replicated.
      indivisible: what to do when no dimension is divisible: `"pad"` the one that wastes least, or
        `"replicate"` the array.

    Returns:
      A rule for `rules=` of `shard_train_state`.

    Raises:
      GShardError: an argument is out of range.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", rules=gshard.by_shape(1024))
      >>> plan.params["w"].dim, plan.params["b"].dim
      (0, None)
    """
    min_shard_size = check_integer("min_shard_size", min_shard_size, 0, " of elements")
    if indivisible not in ("pad", REPLICATE):
        raise GShardError(f"indivisible={indivisible!r} is unknown. Choose 'pad' or 'replicate'.")

    def rule(leaf: LeafInfo) -> ShardDim:
        if leaf.layer_size <= min_shard_size:
            return ShardDim(None, f"{leaf.layer_size} elements <= min_shard_size {min_shard_size}")
        fixed = leaf.taken | {leaf.scan_dim}
        dims = [d for d, size in enumerate(leaf.shape) if d not in fixed and size > 0]
        divisible = [d for d in dims if leaf.shape[d] % leaf.shards == 0]

        def fit(d: int) -> tuple[bool, bool, int]:
            local = leaf.shape[d] // leaf.shards
            tile = 128 if d == len(leaf.shape) - 1 else 16
            return local % tile == 0, d == dims[0], local

        def waste(d: int) -> float:
            return -leaf.shape[d] % leaf.shards / leaf.shape[d]

        if divisible:
            return ShardDim(max(divisible, key=fit), "divisible")
        if not dims:
            others = " next to your own mesh axes" if leaf.taken else ""
            return ShardDim(None, f"no dimension to shard{others}")
        reason = f"no dimension is divisible by {leaf.shards}"
        if indivisible == REPLICATE:
            return ShardDim(None, f"{reason} (indivisible='replicate')")
        return ShardDim(min(dims, key=waste), f"padded: {reason}")

    return rule


# The setting that would shard a replicated leaf, by a part of the reason why it is replicated.
_SETTINGS = {
    "<= min_shard_size": "min_shard_size= below the elements of one layer",
    "no dimension is divisible": "indivisible='pad'",
    "no dimension to shard": "scan_axes=, or rules= with another dimension",
    "one device in the shard group": "more devices in the shard group",
    "is not a number": "",
}


def setting_of(reason: str) -> str:
    """Returns the setting that would shard a leaf replicated for `reason`; empty if none would."""
    found = (setting for part, setting in _SETTINGS.items() if part in reason)
    return next(found, "rules=, which says so")


def by_path(pattern: str, dim: int | str) -> Rule:
    """Makes a rule for the arrays whose path matches a regular expression.

    Scalars, such as an optimizer's step count, are skipped: they have no dimension.

    Args:
      pattern: searched in the path, not anchored, such as `r"embedding$"` or `"^Dense_[01]/"`.
      dim: the dimension to shard (negative counts from the end), or `"replicate"`.

    Returns:
      A rule for `rules=` of `shard_train_state`.

    Raises:
      GShardError: the pattern is not a regular expression; or, from the rule, `dim` cannot be
        sharded.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", rules=gshard.by_path("^w$", 1))
      >>> plan.params["w"].dim
      1
    """
    return partial(_by_path, validation.pattern(pattern, "rule"), dim)


def _by_path(pattern: re.Pattern[str], dim: int | str, leaf: LeafInfo) -> ShardDim | None:
    if not leaf.shape or not pattern.search(leaf.path):
        return None
    return check_answer(leaf, dim, f"rule {pattern.pattern!r}")


def by_predicate(
    predicate: Callable[[LeafInfo], bool], dim: int | str, reason: str = "rule"
) -> Rule:
    """Makes a rule for the arrays for which `predicate(leaf)` is true.

    Args:
      predicate: a function of a `LeafInfo` that returns True or False.
      dim: the dimension to shard (negative counts from the end), or `"replicate"`.
      reason: why, for the table of the plan.

    Returns:
      A rule for `rules=` of `shard_train_state`.

    Raises:
      GShardError: `predicate` is not a function; or, from the rule, it cannot be called with a
        `LeafInfo`, or `dim` cannot be sharded.

    Example:
      >>> rule = gshard.by_predicate(lambda leaf: len(leaf.shape) == 2, 1, "a matrix")
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", rules=rule)
      >>> plan.params["w"].dim, plan.params["w"].reason
      (1, 'a matrix')
    """
    if not callable(predicate):
        raise GShardError(
            f"by_predicate: predicate={shown(predicate)} is not a function. Pass one that takes a "
            "gshard.LeafInfo, or gshard.by_path(pattern, dim) for a pattern of paths."
        )

    def rule(leaf: LeafInfo) -> ShardDim | None:
        found = _answer(predicate, leaf, "by_predicate")
        return check_answer(leaf, dim, reason) if found else None

    return rule


def check_answer(leaf: LeafInfo, answer: Any, reason: str) -> ShardDim:
    """Converts the answer of a user's rule (see `as_rules`) for one leaf, or refuses it."""
    if isinstance(answer, ShardDim):
        answer, reason = REPLICATE if answer.dim is None else answer.dim, answer.reason
    if isinstance(answer, str) and answer == REPLICATE:
        return ShardDim(None, reason)
    chosen, fault = dimension(answer, len(leaf.shape)), ""
    if not leaf.shape:
        fault = "a scalar has no dimension to shard. Give 'replicate' for it, or None"
    elif chosen is None:
        fault = f"give a dimension from 0 to {len(leaf.shape) - 1}, or 'replicate'"
    elif not leaf.shape[chosen]:
        fault = "that dimension is empty. Give another one, or 'replicate'"
    elif chosen == leaf.scan_dim and not leaf.params_replicated:
        fault = (
            "a scan iterates over that dimension layer by layer. Give another one where parameters "
            "are sharded; at 'os' and 'os_g' this one is possible"
        )
    elif chosen in leaf.taken:
        fault = (
            "that dimension is sharded over another mesh axis already: your own, or the one that "
            "keep= names. Give another dimension, or 'replicate'"
        )
    if fault:
        raise GShardError(
            f"{reason} gives dimension {shown(answer)} for {leaf.path} {leaf.shape}: {fault}."
        )
    return ShardDim(chosen, reason)


def first_of(rules: Sequence[Rule]) -> Rule:
    """Combines rules into one that returns the first answer that is not None."""

    def rule(leaf: LeafInfo) -> ShardDim | None:
        return next((c for c in (r(leaf) for r in rules) if c is not None), None)

    return rule


def as_rules(rules: Any) -> list[Rule]:
    """Converts a `rules=` argument to a list of rules.

    Accepts a mapping from path pattern to dimension or `"replicate"`, a function of a `LeafInfo`
    that returns a dimension, `"replicate"`, a `ShardDim` or None, or a sequence of these.
    """
    if rules is None:
        return []
    if isinstance(rules, Mapping):
        return [by_path(pattern, dim) for pattern, dim in rules.items()]
    if callable(rules):
        name = f"rule {getattr(rules, '__name__', type(rules).__name__)}"

        def own(leaf: LeafInfo) -> ShardDim | None:
            answer = _answer(rules, leaf, "rules=")
            return None if answer is None else check_answer(leaf, answer, name)

        return [own]
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        return [rule for item in rules for rule in as_rules(item)]
    raise GShardError(
        f"rules={shown(rules)} is not a rule. Give a mapping {{path pattern: dimension or "
        "'replicate'}, a function of a gshard.LeafInfo, or a sequence of these."
    )


def _answer(function: Callable[[LeafInfo], Any], leaf: LeafInfo, argument: str) -> Any:
    """Calls a user's function; explains where it takes a path, as those of optax and Flax do."""
    advice = f"A function for {argument} is called with one gshard.LeafInfo: leaf.path, leaf.shape."
    check_takes(function, advice, leaf)
    try:
        return function(leaf)
    except (AttributeError, TypeError) as error:
        if LeafInfo.__name__ not in str(error):
            raise
        raise GShardError(f"{place_of(function)}: {error}. {advice}") from error


def warn_of_unused(argument: str, patterns: Any, paths: Sequence[str]) -> None:
    """Warns of path patterns, those in a list too, that match no path and so do nothing."""
    if isinstance(patterns, partial) and patterns.func is _by_path:
        patterns = {patterns.args[0].pattern: patterns.args[1]}
    if isinstance(patterns, Sequence) and not isinstance(patterns, str):
        for each in patterns:
            warn_of_unused(argument, each, paths)
    if not isinstance(patterns, Mapping):
        return
    for text in patterns:
        compiled = validation.pattern(text, argument)
        if not any(compiled.search(path) for path in paths):
            warn(
                f"{argument}: the pattern {text!r} matches no path.{did_you_mean(text, paths)} "
                f"There are {some(paths)}."
            )
    validation.warn_of_cut_numbers(argument, patterns, paths, in_order=argument != "frozen")


ScanAxes = Mapping[str, int] | Sequence[str] | None


def check_scan_axes(scan_axes: ScanAxes, params: Mapping[str, Any]) -> None:
    """Refuses `scan_axes` that are neither names nor dimensions of the parameters they match."""
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
                f"scan_axes[{found!r}]={shown(scan_axes[found])} is not a dimension of {path} "
                f"{leaf.shape}."
            )


def scan_dim_of(
    path: str, leaf: Any, names: Sequence[str | None] | None, scan_axes: ScanAxes
) -> int | None:
    """Returns the dimension of a leaf that a scan over layers iterates over, or None.

    `names` are those of its dimensions in Flax's metadata, if any; `scan_axes` is the user's.
    """
    if isinstance(scan_axes, Mapping):
        found = _pattern_for(path, scan_axes)
        if found is not None:
            return dimension(scan_axes[found], len(leaf.shape))
    known = (*SCAN_NAMES, *_names_in(scan_axes))
    return next((d for d, name in enumerate(names or ()) if name in known), None)


def _names_in(scan_axes: ScanAxes) -> Sequence[str]:
    if scan_axes is None or isinstance(scan_axes, Mapping):
        return ()
    return (scan_axes,) if isinstance(scan_axes, str) else scan_axes


def warn_of_unused_scan_axes(
    scan_axes: ScanAxes, paths: Sequence[str], names: Iterable[Sequence[str | None]]
) -> None:
    """Warns of patterns that match no path, and of names that Flax's metadata does not have."""
    warn_of_unused("scan_axes", scan_axes, paths)
    known = {name for each in names for name in each if name}
    if unknown := [name for name in _names_in(scan_axes) if name not in known]:
        there = f"It has {some(sorted(known))}" if known else "There is none in this state"
        warn(
            f"scan_axes: no dimension is named {some(unknown)} in Flax's metadata. {there}. To say "
            "which dimension of a path is scanned, give a mapping: scan_axes={'^layers/': 0}."
        )


def _pattern_for(path: str, scan_axes: Mapping[str, Any]) -> str | None:
    matches = (p for p in scan_axes if validation.pattern(p, "scan_axes").search(path))
    return next(matches, None)


def frozen_paths(params: Any, frozen: Any) -> frozenset[str]:
    """Returns the paths of the parameters that are not trained: `frozen=` and all integers.

    `frozen` is None; one path pattern or several; a function of a `LeafInfo`; or a tree like the
    parameters with True where one is frozen.
    """
    paths, leaves, _ = flatten(params)
    check_unique(paths, "parameters")
    integers = {
        p for p, x in zip(paths, leaves, strict=True) if not jnp.issubdtype(x.dtype, jnp.inexact)
    }
    found = integers | _frozen(paths, leaves, frozen)
    if paths and len(found) == len(paths):
        raise GShardError(
            f"frozen={shown(frozen)} and integer dtypes leave no parameter to train, of "
            f"{some(paths)}."
        )
    return frozenset(found)


def _frozen(paths: list[str], leaves: list[Any], frozen: Any) -> set[str]:
    if frozen is None:
        return set()
    texts = [frozen] if isinstance(frozen, str) else frozen
    if isinstance(texts, (list, tuple)) and all(isinstance(x, str) for x in texts):
        warn_of_unused("frozen", dict.fromkeys(texts), paths)
        patterns = [validation.pattern(text, "frozen") for text in texts]
        return {path for path in paths if any(x.search(path) for x in patterns)}
    if callable(frozen):
        argument = "the function frozen="
        answers = [
            _answer(frozen, LeafInfo(path, tuple(x.shape), x.dtype, None, 1), "frozen=")
            for path, x in zip(paths, leaves, strict=True)
        ]
    else:
        argument, (given, answers, _) = "frozen=", flatten(frozen)
        if given != paths:
            raise GShardError(
                f"frozen={shown(frozen)} is not a tree like the parameters: "
                f"{differences(given, paths)}. Give True or False for each parameter, a pattern of "
                "paths, or a function of a gshard.LeafInfo."
            )
    for path, answer in zip(paths, answers, strict=True):
        if not isinstance(answer, (bool, np.bool_)):
            raise GShardError(f"{argument} gives {shown(answer)} for {path}: give True or False.")
    return {path for path, answer in zip(paths, answers, strict=True) if answer}
