"""Reads moments that a checkpoint has in 8 bits, or in other blocks, into a state that has not.

They are read as they are stored, and then decoded or encoded on the devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import jax

from gshard._util.pytree import path_of
from gshard.sharding.layout import DEVICE, Layout
from gshard.sharding.plan import Plan
from gshard.sharding.precision import is_floating
from gshard.sharding.quantized_array import QuantizedArray, is_quantized
from gshard.sharding.state_dtype import decoded_layouts, quantized_layout

AT_ONCE = 2**28  # bytes of moments on one device, as read, that are converted together


class Stored(Protocol):
    """What a checkpoint says of an array: of codes, the dimension of the blocks and its shards."""

    @property
    def blocks(self) -> tuple[int, int] | None: ...  # noqa: D102


def nodes_of(plan: Plan) -> dict[str, Any]:
    """Returns the layouts of a state by path; those of a `QuantizedArray` are one entry."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(plan.layouts, is_leaf=is_quantized)
    return {path_of(keys): x for keys, x in pairs}


def blocks_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """Returns the dimension of the blocks, and its number of shards, by the path of codes."""
    nodes = nodes_of(plan).items()
    return {f"{path}/codes": (x.axis, x.shards) for path, x in nodes if is_quantized(x)}


def stored_otherwise(plan: Plan, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Returns, by path, the layouts to read those moments in that are stored in another form."""
    found: dict[str, Any] = {}
    for path, x in nodes_of(plan).items():
        codes = stored.get(f"{path}/codes")
        blocks = codes.blocks if codes else None
        if is_quantized(x) and path in stored:
            found[path] = decoded_layouts(x).in_memory(DEVICE)
        elif blocks and is_quantized(x) and blocks != (x.axis, x.shards):
            found[path] = _in_blocks(decoded_layouts(x), *blocks)
        elif blocks and not is_quantized(x) and path not in stored and is_floating(x.dtype):
            found[path] = _in_blocks(x, *blocks)
    return found


def _in_blocks(layout: Layout, axis: int, shards: int) -> Any:
    """Returns the layouts of codes and scales to read, in blocks of another plan.

    Model-parallel axes and the kept axis shard the scales only if they divide the number of blocks.
    """
    found = quantized_layout(layout.in_memory(DEVICE), axis, shards)
    scales, kept = found.scales, layout.kept
    names = list(layout.model_axes)
    sizes = dict(layout.group.model_axes)
    if names and scales.shape[axis] % math.prod(sizes[name] for name in names[axis]):
        names[axis] = ()
        scales = dataclasses.replace(scales, model_axes=tuple(names))
    if kept is not None and kept.dim == axis and scales.shape[axis] % kept.devices:
        scales = dataclasses.replace(scales, kept=None)
    return dataclasses.replace(found, scales=scales)


def convert(x: Any, read: Any, wanted: Any, plan: Plan) -> Any:
    """Converts what was read in the layouts `read` to the form and the layouts `wanted`."""
    leaves, structure = jax.tree.flatten((read, wanted))
    return _converter(*leaves, structure, *map(plan.sharding, jax.tree.leaves(wanted)))(x)


@lru_cache(maxsize=256)
def _converter(*args: Any) -> Any:
    """Makes the jitted conversion between two forms, whose leaves come before their structure."""
    at = next(i for i, x in enumerate(args) if not isinstance(x, Layout))
    read, wanted = jax.tree.unflatten(args[at], args[:at])
    plain = decoded_layouts(wanted)

    def converted(x: Any) -> Any:
        x = jax.tree.map(lambda x, layout: layout.unpad(x), x, read)
        x = x.decode() if is_quantized(x) else x
        x = plain.pad(x.astype(plain.dtype))
        if is_quantized(wanted):
            return QuantizedArray.encode(x, wanted.axis, wanted.shards, wanted.dtype)
        return x

    shardings = jax.tree.unflatten(jax.tree.structure(wanted), args[at + 1 :])
    return jax.jit(converted, out_shardings=shardings)
