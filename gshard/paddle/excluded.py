"""`exclude_layer`: layers whose parameters stay whole, as rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flax import nnx

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.pytree import flatten
from gshard._util.validation import shown
from gshard.sharding.rules import Leaf


def excluding(entries: Any, model: nnx.Module) -> Callable[[Leaf], str | None]:
    """A rule by which the parameters of these layers, and of layers within, stay whole.

    Args:
      entries: a list of class names (`"GroupNorm"`), `id(layer)`s, paths of layers
        (`"decoder.norm"`), and patterns that are searched in paths of parameters.
      model: the user's own, whose layers have these ids.

    Raises:
      GShardError: for another type, or an entry that finds nothing.
    """
    if not isinstance(entries, (list, tuple)):
        raise GShardError(
            f"exclude_layer={shown(entries)} must be a list of class names, ids of layers or "
            "patterns of paths, such as ['GroupNorm', id(model.head), 'decoder.norm']."
        )
    layers = [("/".join(map(str, path)), layer) for path, layer in nnx.iter_modules(model)]
    paths = flatten(nnx.as_pure(nnx.state(model)))[0]
    beginnings: list[str] = []
    patterns: list[re.Pattern[str]] = []
    for entry in entries:
        found = [path for path, layer in layers if _is(path, layer, entry)]
        if found:
            beginnings += found
        elif isinstance(entry, str) and (compiled := _pattern(entry, paths)) is not None:
            patterns.append(compiled)
        else:
            classes = {type(layer).__name__ for _, layer in layers}
            hint = did_you_mean(entry, classes | {path for path, _ in layers if path})
            raise GShardError(
                f"exclude_layer: {shown(entry)} is no layer of the model.{hint} It has the "
                f"classes {sorted(classes)}; ids are those of the model's own layers, "
                "id(model.head), and patterns are searched in paths such as "
                f"{paths[0] if paths else ''!r}."
            )

    def excluded(leaf: Leaf) -> str | None:
        inside = any(not p or leaf.path.startswith(f"{p}/") for p in beginnings)
        return "whole" if inside or any(p.search(leaf.path) for p in patterns) else None

    return excluded


def _is(path: str, layer: Any, entry: Any) -> bool:
    if isinstance(entry, str):
        return entry == type(layer).__name__ or bool(path) and entry.replace(".", "/") == path
    return isinstance(entry, int) and id(layer) == entry


def _pattern(entry: str, paths: list[str]) -> re.Pattern[str] | None:
    """The pattern that finds one of the paths; dots may stand for slashes, as in Paddle's names."""
    for text in (entry, entry.replace(".", "/")):
        try:
            compiled = re.compile(text)
        except re.error:
            continue
        if any(compiled.search(path) for path in paths):
            return compiled
    return None
