"""Trees by path: how leaves are named, and whether two trees have the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError, some


def path_of(keys: tuple[Any, ...]) -> str:
    """A key path as `a/b/c`; the `value` of a Linen box or an NNX Variable is not named."""
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure of a tree."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path_of(keys) for keys, _ in pairs], [leaf for _, leaf in pairs], structure


def subscript(path: str) -> str:
    """A path behind the name of its tree, as in `batch['x/y']`; nothing for a tree of one leaf."""
    return f"[{path!r}]" if path else ""


def belongs_to(
    paths: Sequence[str],
    known: Collection[str],
    fits: Callable[[int, str], bool] = lambda position, name: True,
) -> list[tuple[str, str] | None]:
    """For every path the known one that it ends in, with what comes before, or None.

    Moments, master copies, averages. Where two endings fit (a parameter `mu/w` beside `w`), the one
    whose beginning holds more of the known is meant, then the longer one. `fits` may refuse one for
    the path at a position.
    """

    def endings(position: int, path: str) -> list[tuple[str, str]]:
        keys = path.split("/")
        ends = [("/".join(keys[:i]), "/".join(keys[i:])) for i in range(len(keys) + 1)]
        return [(b, e) for b, e in ends if e in known and fits(position, e)]

    found = [endings(i, path) for i, path in enumerate(paths)]
    held = Counter(beginning for ends in found for beginning, _ in ends)
    return [max(ends, key=lambda end: held[end[0]], default=None) for ends in found]


def refuse_twice(paths: list[str], what: str) -> None:
    """Raises a `GShardError` when two leaves have the same path."""
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise GShardError(
            f"two {what} have the same path: {some(twice)}. Rename one of them (a key that "
            "contains '/' does that)."
        )


def differences(paths: Collection[str], known: Collection[str]) -> str:
    """Which of the known paths are missing and which were added, for a message."""
    missing = [path for path in known if path not in set(paths)]
    added = [path for path in paths if path not in set(known)]
    return f"missing {some(missing) or 'none'}; added {some(added) or 'none'}"


def same_leaves(tree: Any, known: Iterable[str], what: str) -> Any:
    """The structure of `tree`, after checking that its leaves have the paths `known`, in order.

    Raises:
      GShardError: names the paths that are missing and those that were added.
    """
    paths, _, structure = flatten(tree)
    known = list(known)
    if paths != known:
        raise GShardError(
            f"{what} not the tree that the plan was made for: {differences(paths, known)}. Pass "
            "what gshard.shard_train_state returned, or make a new plan with it (and build the "
            "step again)."
        )
    return structure


def no_numbers(dtype: Any) -> str:
    """Why arrays of this dtype are no data of a batch, in words; empty for numbers and bools."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            "holds keys of jax.random, whose rows cannot lie on several processes: pass "
            "jax.random.key_data of them (and jax.random.wrap_key_data in the loss)"
        )
    if dtype != np.bool_ and not jnp.issubdtype(dtype, np.number):
        return f"has dtype {dtype}: a batch holds numbers"
    return ""
