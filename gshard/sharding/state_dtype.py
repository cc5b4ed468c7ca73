"""Decides which arrays of an optimizer state are stored in 8 bits, and in which blocks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gshard._util.errors import some, warn
from gshard._util.pytree import belongs_to, flatten
from gshard.sharding.layout import Layout
from gshard.sharding.moments import no_moments
from gshard.sharding.precision import Precision, first_match, is_floating
from gshard.sharding.quantized_array import (
    QuantizedArray,
    block_sizes,
    is_quantized,
    quantized_arrays,
)

MIN_SIZE = 4096  # elements of an array that is worth it, as in the paper's section 2
EMBEDDINGS = r"(?i)(?<!un)embed|wte|wpe"  # whose moments keep their dtype (section 2.3)
_LONG = 64  # entries of a block, whose scale then takes 1/16 byte for each
_SHORT = 16


def in_state_dtype(
    precision: Precision, layouts: Any, params: Mapping[str, Layout], others: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """Returns the layouts of an optimizer state with `QuantizedArray`s of two layouts for moments.

    Moments are arrays whose path ends in a parameter's and that have its shape. `others` says by
    path why some of these are none. The second result says by path why arrays that belong to a
    parameter keep their dtype.
    """
    paths, leaves, structure = flatten(layouts)

    def same_shape(position: int, name: str) -> bool:
        return params[name].shape == leaves[position].shape

    kept: dict[str, str] = {}
    found = []
    for path, x, end in zip(paths, leaves, belongs_to(paths, params, same_shape), strict=True):
        if end is None or not is_floating(x.dtype):
            found.append(x)
            continue
        wanted = _wanted(precision, path, end[1])
        axis, shards, block = _blocks(x)
        if path in others:
            kept[path] = others[path]
        elif wanted is False:
            kept[path] = "state_exceptions"
        elif wanted is None and re.search(EMBEDDINGS, end[1]):
            kept[path] = "an embedding"
        elif x.size == 0 or not x.shape or (wanted is None and x.size < MIN_SIZE):
            kept[path] = f"{x.size} elements < {MIN_SIZE}"
        elif wanted is None and block < _SHORT:
            kept[path] = f"blocks of {block} elements are too short"
        found.append(x if path in kept else quantized_layout(x, axis, shards))
    return structure.unflatten(found), kept


def _wanted(precision: Precision, path: str, param: str) -> bool | None:
    """Whether the user's patterns want an array in 8 bits; None if they do not say."""
    wanted = {text: dtype is not None for text, dtype in precision.state_exceptions.items()}
    return first_match(wanted, (param, path), None)


def quantized_layout(layout: Layout, axis: int, shards: int) -> Any:
    """Returns the layouts of the codes and scales of an array."""
    _, count, _ = block_sizes(layout.shape[axis], shards)
    shape = (*layout.shape[:axis], shards * count, *layout.shape[axis + 1 :])
    codes = dataclasses.replace(layout, path=f"{layout.path}/codes", dtype=jnp.dtype(jnp.int8))
    scales = dataclasses.replace(
        layout, path=f"{layout.path}/scales", shape=shape, dtype=jnp.dtype(jnp.float32)
    )
    return QuantizedArray(codes, scales, axis, shards, str(layout.dtype))


def decoded_layouts(layouts: Any) -> Any:
    """Returns the layouts that the arrays of an optimizer state have while it is updated."""

    def decoded(x: Any) -> Any:
        if not is_quantized(x):
            return x
        path = x.codes.path.removesuffix("/codes")
        return dataclasses.replace(x.codes, path=path, dtype=jnp.dtype(x.dtype))

    return jax.tree.map(decoded, layouts, is_leaf=is_quantized)


def _blocks(layout: Layout) -> tuple[int, int, int]:
    """Chooses the dimension of the blocks; returns it, its number of shards, and their length.

    Blocks are along a dimension that is not sharded, where one is long enough, so that they do not
    depend on the number of devices. Else they end at the borders of shards.
    """
    sizes = dict(layout.group.model_axes)
    best = (False, 0, 0, 1)
    for dim, size in enumerate(layout.shape):
        names = layout.model_axes[dim] if layout.model_axes else ()
        shards = math.prod(sizes[name] for name in names)
        shards *= layout.group.size if dim == layout.dim else 1
        shards *= layout.kept.devices if layout.kept and dim == layout.kept.dim else 1
        block = block_sizes(size, shards)[2] if size else 0
        best = max(best, (shards == 1 and block >= _LONG, block, dim, shards))
    _, block, axis, shards = best
    return axis, shards, block


def quantized_state(
    precision: Precision,
    layouts: Any,
    params: Mapping[str, Layout],
    tx: optax.GradientTransformation,
    own: Any,
) -> tuple[Any, dict[str, str]]:
    """Does what `in_state_dtype` does, and warns if it has no effect.

    `own` are the abstract shards of the parameters that `tx` updates.
    """
    others = no_moments(tx, own)
    found, kept = in_state_dtype(precision, layouts, params, others)
    if not quantized_arrays(found):
        reasons = [f"{path} ({reason})" for path, reason in kept.items()]
        why = f" that can be stored in 8 bits: {some(reasons, most=3)}" if reasons else ""
        more = " state_exceptions={pattern: 'int8'} chooses arrays by path."
        more = "" if kept.keys() <= others.keys() else more
        warn(f"state_dtype='int8' has no effect: the optimizer has no moments{why}.{more}")
    return found, kept
