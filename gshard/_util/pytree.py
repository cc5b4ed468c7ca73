"""Paths of the leaves of pytrees, and checks that two trees have the same leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gshard._util.errors import GShardError, some
from gshard._util.validation import shown

REGISTER = "register its class (jax.tree_util.register_dataclass), or pass a dict."

_ARRAY_LIKE = (*get_args(jax.typing.ArrayLike), np.generic, jax.ShapeDtypeStruct)
_VALUE = jax.tree_util.GetAttrKey("value")
_OF_8_BITS = tuple(jax.tree_util.GetAttrKey(name) for name in ("codes", "scales"))


def path_of(keys: tuple[Any, ...]) -> str:
    """A key path as `a/b/c`, without the `value` of a Linen box or an NNX Variable.

    The value may be an array in 8 bits, with its codes and scales.
    """
    if keys and keys[-1] == _VALUE:
        keys = keys[:-1]
    elif keys[-2:-1] == (_VALUE,) and keys[-1] in _OF_8_BITS:
        keys = (*keys[:-2], keys[-1])
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure of a tree."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path_of(keys) for keys, _ in pairs], [leaf for _, leaf in pairs], structure


def map_leaves(fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps leaves in order; unlike `jax.tree.map` it allows other trees of other structures."""
    leaves, structure = jax.tree.flatten(tree)
    columns = zip(leaves, *map(jax.tree.leaves, others), strict=True)
    return jax.tree.unflatten(structure, [fun(*column) for column in columns])


def subscript(path: str) -> str:
    """A path as a subscript, as in `batch['x/y']`; empty for a tree of one leaf."""
    return f"[{path!r}]" if path else ""


def belongs_to(
    paths: Sequence[str],
    known: Collection[str],
    fits: Callable[[int, str], bool] = lambda position, name: True,
) -> list[tuple[str, str] | None]:
    """For every path its `(prefix, known path)` where it ends in a known path, else None.

    This finds the parameters of moments, master copies and averages. Where two endings fit (there
    are parameters `mu/w` and `w`), the one whose prefix is the most frequent is returned, then the
    longer one. `fits(position, known path)` can reject an ending.
    """

    def endings(position: int, path: str) -> list[tuple[str, str]]:
        keys = path.split("/")
        ends = [("/".join(keys[:i]), "/".join(keys[i:])) for i in range(len(keys) + 1)]
        return [(b, e) for b, e in ends if e in known and fits(position, e)]

    found = [endings(i, path) for i, path in enumerate(paths)]
    frequency = Counter(beginning for ends in found for beginning, _ in ends)
    return [max(ends, key=lambda end: frequency[end[0]], default=None) for ends in found]


def lists_of_numbers(tree: Any) -> list[tuple[str, list[Any]]]:
    """The lists in a tree that hold only numbers or such lists, with their paths.

    To JAX each number is a leaf of its own, and nobody means that of a list such as token ids.
    """

    def is_one(x: Any) -> bool:
        if not isinstance(x, list) or not x:
            return False
        return all(is_one(y) if isinstance(y, list) else _is_number(y) for y in x)

    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one)
    return [(path_of(keys), x) for keys, x in pairs if isinstance(x, list)]


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex)) and not hasattr(x, "dtype")


def check_unique(paths: list[str], what: str) -> None:
    """Raises a `GShardError` when two leaves have the same path."""
    twice = sorted(path for path, count in Counter(paths).items() if count > 1)
    if twice:
        raise GShardError(
            f"two {what} have the same path: {some(twice)}. Rename one of them (a '/' in a "
            "key can cause this)."
        )


def differences(paths: Collection[str], known: Collection[str]) -> str:
    """Says which of the known paths are missing and which were added, for a message."""
    found, wanted = set(paths), set(known)
    missing = [path for path in known if path not in found]
    added = [path for path in paths if path not in wanted]
    return f"missing {some(missing) or 'none'}; added {some(added) or 'none'}"


_SAME_STATE = (
    "Pass what gshard.shard_train_state returned, or make a new plan with it (and build the step "
    "again)."
)


def same_leaves(tree: Any, known: Iterable[str], what: str, advice: str = _SAME_STATE) -> Any:
    """Checks that the leaves of `tree` have the paths `known`, in order; returns its structure."""
    paths, _, structure = flatten(tree)
    known = list(known)
    if paths != known:
        hint = ""
        if any("/hyperparams/" in path for path in {*paths} - {*known}):
            names = [path.rpartition("/")[2] for path in known if "/hyperparams/" in path]
            hint = f" The optimizer has the hyperparameters {', '.join(names)}."
        if any(path.endswith("/codes") for path in {*known} ^ {*paths}):
            hint = (
                " Codes and scales are those of moments that are stored in 8 bits: "
                "state.tx.init(state.params) makes a new optimizer state with them."
            )
        raise GShardError(
            f"{what} not the tree that the plan was made for: {differences(paths, known)}. "
            f"{advice}{hint}"
        )
    return structure


def check_array(x: Any, where: str, is_converted: bool = False) -> None:
    """Refuses what JAX would not take as an array, or only without a mask; `where` names it.

    With `is_converted`, NumPy makes an array of it, so a shape and a dtype of NumPy suffice.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise GShardError(
            f"{where} is a NumPy masked array, whose mask would be dropped. Pass x.filled(0), and "
            "the mask as an array of its own."
        )
    if isinstance(x, jax.Array) and not isinstance(x, core.Tracer) and x.is_deleted():
        raise GShardError(
            f"{where} was deleted: its memory was given to a jit with donate_argnums=, or to a "
            "step. Pass what that returned, or a copy made before."
        )
    try:
        _ = jnp.result_type(x), jnp.shape(x)
        is_array = isinstance(x, _ARRAY_LIKE) or hasattr(x, "__jax_array__")
        if not is_array and not is_converted:
            raise TypeError(f"{type(x).__name__} is not an array")
    except (TypeError, ValueError) as error:
        if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
            raise GShardError(
                f"{where} has dtype {x.dtype.str}, whose byte order or size JAX does not "
                "support: pass x.astype(np.float32), or another native NumPy dtype."
            ) from error
        raise GShardError(
            f"{where} is {shown(x)} ({type(x).__module__}) where an array is expected. Pass NumPy "
            "or JAX arrays: np.asarray(x) converts many others, on the host."
        ) from error


def check_fits(x: Any, dtype: Any, where: str) -> None:
    """Refuses integers on the host that do not fit the integer dtype that JAX stores them in."""
    if isinstance(x, jax.Array) or not jnp.issubdtype(dtype, np.integer):
        return
    x, limits = np.asarray(x), jnp.iinfo(dtype)
    if x.dtype.kind not in "iuO" or np.can_cast(x.dtype, limits.dtype) or not x.size:
        return
    for value in (x.min(), x.max()):
        if not limits.min <= int(value) <= limits.max:
            why = (
                " JAX stores 64-bit integers in 32 bits, unless "
                "jax.config.update('jax_enable_x64', True) comes before everything else."
            )
            raise GShardError(
                f"{where} contains {value}, which does not fit {limits.dtype}, {limits.min} to "
                f"{limits.max}.{why if limits.bits == 32 else ''} Use smaller numbers."
            )


def why_not_numeric(dtype: Any) -> str:
    """Says why arrays of a dtype cannot be in a batch; empty for numbers and booleans."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            "contains keys of jax.random, which cannot be sharded over several processes: pass "
            "jax.random.key_data of them (and jax.random.wrap_key_data in the loss)"
        )
    if dtype != np.bool_ and not jnp.issubdtype(dtype, np.number):
        return f"has dtype {dtype}: a batch contains numbers"
    return ""
