"""Rules: which dimension of a leaf is divided.

A rule is a pure function `Leaf -> Choice | None`; None means "not mine", and the next rule decides.
Rules by path or predicate come first, the rule by shape last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard._util import validation
from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.pytree import differences, flatten, refuse_twice
from gshard._util.validation import check_integer, dimension, shown
from gshard.train_state import SCAN_NAMES

REPLICATE = "replicate"


@dataclass(frozen=True)
class LeafInfo:
    """What a rule may look at.

    Attributes:
      path: keys joined by `/`, such as `Dense_0/kernel`.
      shape: logical shape.
      dtype: NumPy or JAX dtype.
      scan_dim: the dimension that a scan over layers walks, or None. The rule by shape never
        divides it; a rule of your own may, where `whole_at_rest`.
      shards: devices in the shard group (N).
      taken: dimensions that lie over the user's own mesh axes, never divided.
      whole_at_rest: the parameter itself stays whole (`os`, `os_g`): only its gradient and its
        optimizer state are divided.
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
        """Elements of one layer: the whole leaf unless it is stacked."""
        layers = 1 if self.scan_dim is None else max(1, self.shape[self.scan_dim])
        return math.prod(self.shape) // layers


@dataclass(frozen=True)
class ShardDim:
    """A dimension to divide, or None for whole, with the reason."""

    dim: int | None
    reason: str


Rule = Callable[[LeafInfo], ShardDim | None]


def by_shape(min_shard_size: int = 2**14, indivisible: str = "pad") -> Rule:
    """Divides every leaf of more than `min_shard_size` elements (of one layer).

    Prefers a dimension that divides; among those one whose local size fills hardware tiles (16
    rows, 128 columns on TPU), then the leading one, whose parts are contiguous.

    Args:
      min_shard_size: elements of one layer; only a larger leaf is divided.
      indivisible: what happens when no dimension divides: `"pad"` the one that wastes least, or
        leave the leaf `"replicate"`.
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
            return ShardDim(max(divisible, key=fit), "divides")
        if not dims:
            others = " beside your own mesh axes" if leaf.taken else ""
            return ShardDim(None, f"no dimension to divide{others}")
        if indivisible == REPLICATE:
            return ShardDim(
                None, f"no dimension divides by {leaf.shards} (indivisible='replicate')"
            )
        return ShardDim(min(dims, key=waste), f"padded: no dimension divides by {leaf.shards}")

    return rule


# What to change in a call, by a part of the reason for which a leaf is whole.
_SETTINGS = {
    "<= min_shard_size": "min_shard_size= below the elements of one layer",
    "no dimension divides": "indivisible='pad'",
    "no dimension to divide": "scan_axes=, or rules= with another dimension",
    "one device in the shard group": "more devices in the shard group",
    "is not a number": "",
}


def setting_of(reason: str) -> str:
    """What to change so that a leaf is divided that is whole for `reason`; empty for nothing."""
    found = (setting for part, setting in _SETTINGS.items() if part in reason)
    return next(found, "rules=, which says so")


def by_path(pattern: str, dim: int | str) -> Rule:
    """Decides for the leaves whose path matches a regular expression (searched, not anchored).

    Single numbers, such as an optimizer's counts, are passed by: they have no dimension.

    Args:
      pattern: such as `r"embedding$"` or `"^Dense_[01]/"`.
      dim: the dimension to divide (negative counts from the end), or `"replicate"`.
    """
    compiled = validation.pattern(pattern, "rule")
    return by_predicate(
        lambda leaf: bool(leaf.shape and compiled.search(leaf.path)), dim, f"rule {pattern!r}"
    )


def by_predicate(
    predicate: Callable[[LeafInfo], bool], dim: int | str, reason: str = "rule"
) -> Rule:
    """Decides for the leaves for which `predicate(leaf)` is true."""

    def rule(leaf: LeafInfo) -> ShardDim | None:
        return checked(leaf, dim, reason) if predicate(leaf) else None

    return rule


def checked(leaf: LeafInfo, dim: Any, reason: str) -> ShardDim:
    """A user's answer for one leaf as a Choice; refuses a dimension that cannot be divided."""
    if isinstance(dim, ShardDim):
        return checked(leaf, REPLICATE if dim.dim is None else dim.dim, dim.reason)
    if isinstance(dim, str) and dim == REPLICATE:
        return ShardDim(None, reason)
    if not leaf.shape:
        raise GShardError(
            f"{reason} gives {shown(dim)} for {leaf.path}, which is a scalar. Give 'replicate' for "
            "it, or None."
        )
    chosen = dimension(dim, len(leaf.shape))
    if chosen is None:
        raise GShardError(
            f"{reason} gives {shown(dim)} for {leaf.path} {leaf.shape}. Give a dimension from 0 to "
            f"{len(leaf.shape) - 1}, or 'replicate'."
        )
    if not leaf.shape[chosen]:
        raise GShardError(
            f"{reason} divides dimension {dim} of {leaf.path} {leaf.shape}, which is empty. Divide "
            "another dimension, or say 'replicate'."
        )
    if chosen == leaf.scan_dim and not leaf.params_replicated:
        raise GShardError(
            f"{reason} divides dimension {dim} of {leaf.path} {leaf.shape}, which is the one a "
            "scan walks over its layers. Divide another dimension where parameters rest divided; "
            "at 'os' and 'os_g' this one can be."
        )
    if chosen in leaf.taken:
        raise GShardError(
            f"{reason} divides dimension {dim} of {leaf.path} {leaf.shape}, which lies over your "
            "own mesh axis already. Divide another dimension, or say 'replicate'."
        )
    return ShardDim(chosen, reason)


def first_of(rules: Sequence[Rule]) -> Rule:
    """The first answer that is not None."""

    def rule(leaf: LeafInfo) -> ShardDim | None:
        return next((c for c in (r(leaf) for r in rules) if c is not None), None)

    return rule


def as_rules(rules: Any) -> list[Rule]:
    """A user's `rules=` argument as a list of rules.

    Accepts a mapping from path pattern to dimension or `"replicate"`, a function of a `Leaf` that
    returns a dimension, `"replicate"`, a `Choice` or None, or a sequence of these.
    """
    if rules is None:
        return []
    if isinstance(rules, Mapping):
        return [by_path(pattern, dim) for pattern, dim in rules.items()]
    if callable(rules):
        name = f"rule {getattr(rules, '__name__', type(rules).__name__)}"

        def own(leaf: LeafInfo) -> ShardDim | None:
            answer = rules(leaf)
            return None if answer is None else checked(leaf, answer, name)

        return [own]
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        return [rule for item in rules for rule in as_rules(item)]
    raise GShardError(
        f"rules={shown(rules)} is not a rule. Give a mapping {{path pattern: dimension or "
        "'replicate'}}, a function of a gshard.LeafInfo, or a sequence of these."
    )


ScanAxes = Mapping[str, int] | Sequence[str] | None


def check_scan_axes(scan_axes: ScanAxes, params: Mapping[str, Any]) -> None:
    """Refuses `scan_axes` that are no names and no dimensions of the parameters they match."""
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
                f"scan_axes[{found!r}]={shown(scan_axes[found])} is no dimension of {path} "
                f"{leaf.shape}."
            )


def scan_dim_of(
    path: str, leaf: Any, names: Sequence[str | None] | None, scan_axes: ScanAxes
) -> int | None:
    """The dimension that a scan walks; a pattern that fits a field by chance does not count."""
    known = SCAN_NAMES if scan_axes is None else scan_axes
    if isinstance(scan_axes, Mapping):
        found = _pattern_for(path, scan_axes)
        if found is not None:
            return dimension(scan_axes[found], len(leaf.shape))
        known = SCAN_NAMES
    known = (known,) if isinstance(known, str) else known
    return next((d for d, name in enumerate(names or ()) if name in known), None)


def _pattern_for(path: str, scan_axes: Mapping[str, Any]) -> str | None:
    matches = (p for p in scan_axes if validation.pattern(p, "scan_axes").search(path))
    return next(matches, None)


def frozen_paths(params: Any, frozen: Any) -> frozenset[str]:
    """Paths of the parameters that are not trained: those of `frozen=`, and all integers.

    Args:
      params: a tree of arrays, concrete or abstract.
      frozen: None; a pattern of paths or several; a function of a `Leaf`; or a tree like the
        parameters with True where one is frozen.

    Raises:
      GShardError: `frozen` is none of these, a tree of another structure, or leaves nothing.
    """
    paths, leaves, _ = flatten(params)
    refuse_twice(paths, "parameters")
    chosen = _frozen(paths, leaves, frozen)
    fixed = {
        p for p, x in zip(paths, leaves, strict=True) if not jnp.issubdtype(x.dtype, jnp.inexact)
    }
    if paths and len(chosen | fixed) == len(paths):
        raise GShardError(
            f"frozen={shown(frozen)} and integer dtypes leave no parameter to train, of "
            f"{some(paths)}."
        )
    return frozenset(chosen | fixed)


def _frozen(paths: list[str], leaves: list[Any], frozen: Any) -> set[str]:
    if frozen is None:
        return set()
    if isinstance(frozen, str):
        return _matching_paths(paths, [frozen])
    if isinstance(frozen, (list, tuple)) and all(isinstance(x, str) for x in frozen):
        return _matching_paths(paths, frozen)
    if callable(frozen):
        return _accepted_paths(paths, leaves, frozen)
    given, flags, _ = flatten(frozen)
    if given != paths:
        raise GShardError(
            f"frozen={shown(frozen)} is not a tree like the parameters: "
            f"{differences(given, paths)}. "
            "Give True or False for each parameter, a pattern of paths, or a function of a "
            "gshard.LeafInfo."
        )
    _refuse_other_answers(paths, flags, "frozen")
    return {path for path, flag in zip(paths, flags, strict=True) if flag}


def _matching_paths(paths: list[str], patterns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for text in patterns:
        compiled = validation.pattern(text, "frozen")
        matches = {path for path in paths if compiled.search(path)}
        if not matches:
            warn(
                f"frozen: the pattern {text!r} matches no path.{did_you_mean(text, paths)} "
                f"There are {some(paths)}."
            )
        found |= matches
    return found


def _accepted_paths(
    paths: list[str], leaves: list[Any], test: Callable[[LeafInfo], Any]
) -> set[str]:
    answers = [
        test(LeafInfo(path, tuple(x.shape), x.dtype, None, 1))
        for path, x in zip(paths, leaves, strict=True)
    ]
    _refuse_other_answers(paths, answers, "the function frozen=")
    return {path for path, answer in zip(paths, answers, strict=True) if answer}


def _refuse_other_answers(paths: list[str], answers: Sequence[Any], what: str) -> None:
    for path, answer in zip(paths, answers, strict=True):
        if not isinstance(answer, (bool, np.bool_)):
            raise GShardError(f"{what} says {shown(answer)} for {path}: say True or False.")
