"""How the arrays of a batch are sharded: examples on dimension 0, sequences on dimension 1."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.pytree import flatten, subscript
from gshard._util.text import bytes_of
from gshard._util.validation import check_integer, pattern, shown
from gshard.sharding.group import Group
from gshard.sharding.topology import SEQUENCE

SequenceDims = Mapping[str, int | None]
_EXAMPLE = "sequence_dims={'frames': 2}"


def checked_sequence_dims(given: Any, group: Group) -> SequenceDims:
    """Refuses all but a mapping from patterns to dimensions, and warns where it has no effect."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise GShardError(
            f"sequence_dims={shown(given)} must map path patterns of the batch to the dimension of "
            f"the sequence, from 1 on, or to None, such as {_EXAMPLE}."
        )
    for text in given:
        pattern(text, "sequence_dims")
    given = {
        text: dim if dim is None else check_integer(f"sequence_dims[{text!r}]", dim, 1)
        for text, dim in given.items()
    }
    if given and group.sequence == 1:
        warn(
            f"sequence_dims={shown(given)} changes nothing on a mesh without a sequence axis. "
            "Leave it out, or make one: gshard.make_mesh(sequence=4)."
        )
        return {}
    return given


def sequence_dims(
    batch: Any, group: Group, slices: int = 1, given: SequenceDims | None = None
) -> list[int | None]:
    """Returns the dimension of each leaf that is sharded over the sequence axis, None for no one.

    Dimension 1 is, where it is a multiple of the axis, whatever it means: where an array is stored
    does not change what a loss computes. Others are replicated over the axis.

    Args:
      batch: a tree of arrays, of which shapes alone are read.
      group: the data axes.
      slices: of a sequence on each device; 2 in zig-zag order.
      given: the dimension of some arrays, by patterns of their paths; the first that matches.

    Raises:
      GShardError: the longest dimension 1, or one that is given, cannot be sharded.
    """
    if group.sequence == 1:
        return [None] * len(jax.tree.leaves(batch))
    paths, leaves, _ = flatten(batch)
    if not leaves:
        return []
    asked = [_asked(path, given or {}) for path in paths]
    shapes = [jnp.shape(x) for x in leaves]
    lengths = [
        (shape[1] if len(shape) > 1 else 0) if dim == _DEFAULT else 0
        for shape, dim in zip(shapes, asked, strict=True)
    ]
    longest = max(range(len(leaves)), key=lengths.__getitem__)
    if lengths[longest]:
        _check(paths[longest], shapes[longest], 1, group, slices)
    for path, shape, dim in zip(paths, shapes, asked, strict=True):
        if dim is not None and dim != _DEFAULT:
            _check(path, shape, dim, group, slices)
    size = group.sequence * slices
    fitting = [1 if n and n % size == 0 else None for n in lengths]
    found = [x if x != _DEFAULT else y for x, y in zip(asked, fitting, strict=True)]
    if all(dim is None for dim in found) and None not in asked:
        raise GShardError(
            f"the mesh has a sequence axis of {group.sequence} devices, and no array of the batch "
            "has a dimension 1 to shard over it. Use a mesh without sequence=, or name another "
            f"dimension: {_EXAMPLE} of shard_train_state. For an evaluation without sequences pass "
            f"sequence_dims={{{_pattern(paths[0])!r}: None}}."
        )
    return found


_DEFAULT = -1


def _pattern(path: str) -> str:
    """A pattern for this array alone."""
    return f"^{re.escape(path)}$"


def _asked(path: str, given: SequenceDims) -> int | None:
    return next((dim for text, dim in given.items() if re.search(text, path)), _DEFAULT)


def _check(path: str, shape: Sequence[int], dim: int, group: Group, slices: int) -> None:
    """Refuses a dimension that cannot be sharded over the sequence axis."""
    size, where = group.sequence * slices, f"batch{subscript(path)}"
    if dim >= len(shape):
        raise GShardError(
            f"sequence_dims: {where} has shape {list(shape)}, and no dimension {dim}."
        )
    length = shape[dim]
    if not length or length % size:
        fitting = [n for n in (length // size * size, (length // size + 1) * size) if n]
        order = " in zig-zag order, which takes two slices each" if slices > 1 else ""
        over = f"{group.sequence} devices of the sequence axis{order}"
        another = "or as many devices as divide them"
        if length % group.sequence == 0:
            another = "or sequence_order='contiguous'"
        raise GShardError(
            f"{where} has shape {list(shape)}: its sequences of {length} (dimension {dim}) cannot "
            f"be sharded evenly over the {over}. Use sequences of "
            f"{' or '.join(map(str, fitting))} (padded, with a mask in the loss), {another}. "
            "(If the targets are the inputs shifted by one, pass both, tokens[:, :-1] and "
            "tokens[:, 1:], or one array and shift it in the loss. If dimension "
            f"{dim} is not a sequence, as in one-hot labels, or if an evaluation takes single "
            f"tokens, pass sequence_dims={{{_pattern(path)!r}: None}} to shard_train_state.)"
        )


def check_trained_batch(batch: Any, dims: Sequence[int | None], given: SequenceDims) -> None:
    """Checks the arrays of a batch to train on, of which some may not be sharded as was meant.

    Warns of patterns without an array, and of long arrays that every device has.

    `dims` is the dimension of each array that is sharded over the sequence axis.

    Raises:
      GShardError: the user left no array to shard.
    """
    paths, leaves, _ = flatten(batch)
    for text, dim in given.items():
        if dim is not None and not any(re.search(text, path) for path in paths):
            warn(
                f"sequence_dims: the pattern {text!r} matches no array of the batch."
                f"{did_you_mean(text, paths)} There are {some(sorted(map(repr, paths)))}."
            )
    sizes = [
        math.prod(jnp.shape(x)) * getattr(getattr(x, "dtype", None), "itemsize", 8) for x in leaves
    ]
    shared = {i: dim for i, dim in enumerate(dims) if dim is not None}
    if given and not shared:
        raise GShardError(
            "sequence_dims leaves no array of the batch with a sequence to shard over the sequence "
            f"axis. Name the dimension of one, such as {_EXAMPLE}, or use a mesh without "
            "sequence=. (An array that only an evaluation has in full needs another name.)"
        )
    if not shared:
        return
    lengths = {i: jnp.shape(leaves[i])[dim] for i, dim in shared.items()}
    longest, largest = max(shared, key=lengths.__getitem__), max(shared, key=sizes.__getitem__)

    def described(i: int) -> str:
        return f"batch{subscript(paths[i])} of shape {list(jnp.shape(leaves[i]))}"

    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        named = _asked(path, given) != _DEFAULT
        if dims[i] is not None or jnp.ndim(x) < 2 or named:
            continue
        other, another = f"{described(largest)} ({bytes_of(sizes[largest])})", ""
        if x.shape[1] in (lengths[longest] - 1, lengths[longest] - 2):
            other = described(longest)
            another = f"If both have the same sequence, give both {lengths[longest]} positions. "
        elif sizes[i] <= sizes[largest]:
            continue
        if jnp.ndim(x) > 2:
            another += "If its sequence is another dimension, name that: "
            another += f"sequence_dims={{{_pattern(path)!r}: 2}}. "
        warn(
            f"{described(i)} ({bytes_of(sizes[i])}) is not sharded over the sequence axis, unlike "
            f"{other}, because its dimension 1 is not a multiple of the axis. Every device of the "
            f"axis holds the full array and repeats its computation. {another}If it has no "
            f"sequence, say so: sequence_dims={{{_pattern(path)!r}: None}} of shard_train_state."
        )


def spec_of(x: Any, dim: int | None, group: Group) -> jax.P:
    """Returns the `PartitionSpec` of one array, of which this dimension is of the sequence."""
    if not jnp.ndim(x):
        return jax.P()
    axes = group.batch_axes
    return jax.P(axes) if dim is None else jax.P(axes, *[None] * (dim - 1), SEQUENCE)
