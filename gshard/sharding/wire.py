"""Decides which arrays collectives send quantized: the plan of `gather_dtype=`, `scatter_dtype=`.

An array is quantized if it is floating and sharded, has at least `SMALLEST` elements, a float32
copy that the optimizer updates, and an unsharded dimension to make blocks along. Biases, norms and
other small arrays are sent as they are: they are few bytes, and their rounding costs most.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gshard._util.errors import GShardError, some, warn
from gshard.sharding.layout import Layout
from gshard.sharding.level import Level
from gshard.sharding.nodes import Nodes
from gshard.sharding.precision import Precision, first_match, is_floating
from gshard.sharding.quantized import SHORTEST, BlockCodes, Quantized, wire_dtype

SMALLEST = 4096  # elements of one layer of a quantized array
_CONDITIONS = (
    f"sharded floating arrays of {SMALLEST:,} elements or more, with an unsharded dimension of "
    f"{SHORTEST} or more,"
)


@dataclass(frozen=True)
class Wire:
    """In which dtypes parameters are all-gathered, and gradients reduce-scattered.

    Attributes:
      gather: a key of `LARGEST` or a `Quantized`, or None: as they are.
      scatter: the same.
      exceptions: others for both, by path pattern.
      named: how the user asked for it, in messages.
    """

    gather: str | Quantized | None
    scatter: str | Quantized | None
    exceptions: Mapping[str, str | Quantized | None]
    named: str

    def dtype(self, path: str, default: str | Quantized | None) -> str | Quantized | None:
        """Returns the dtype to send an array in; None: as it is."""
        return None if default is None else first_match(self.exceptions, (path,), default)


def as_wire(precision: Precision | None, wire: Any) -> Wire | None:
    """Converts the `wire=` argument and the fields of a `Precision`; None: all is sent as it is.

    Raises:
      GShardError: both are given, or `wire` is unknown.
    """
    short = wire_dtype(wire, "wire")
    if precision is None or precision.gather_dtype is precision.scatter_dtype is None:
        return None if short is None else Wire(short, short, {}, f"wire={short!r}")
    if short is not None:
        raise GShardError(
            f"wire={short!r} and gather_dtype= or scatter_dtype= of Precision are both given: "
            "wire= is short for the two. Keep one of them."
        )
    found = {name: getattr(precision, name) for name in ("gather_dtype", "scatter_dtype")}
    named = " and ".join(f"{name}={dtype!r}" for name, dtype in found.items() if dtype)
    return Wire(precision.gather_dtype, precision.scatter_dtype, precision.wire_exceptions, named)


def with_wire(
    params: Any,
    grads: Any,
    master: Mapping[str, Layout],
    wire: Wire | None,
    level: Level,
    nodes: Nodes,
) -> tuple[Any, Any]:
    """Returns the layouts of parameters and gradients, with what their collectives send.

    Raises:
      GShardError: a quantized parameter has no float32 copy, or gradients would be sent over an
        axis with several nodes and several devices of each.
    """
    if wire is None:
        return params, grads

    def gathered(x: Layout) -> Layout:
        if x.dim is None or not level.shards_params:
            return x
        found = _how(x, wire.dtype(x.path, wire.gather), False)
        return dataclasses.replace(x, gathered_as=_codes(found))

    def scattered(x: Layout) -> Layout:
        if x.dim is None:
            return x
        found = _how(x, wire.dtype(x.path, wire.scatter), True)
        # The table has one reason for a parameter and its gradient.
        told = _how(x, wire.dtype(x.path, wire.scatter or wire.gather), True)
        reason = x.reason if isinstance(told, BlockCodes) else f"{x.reason}; sent as it is: {told}"
        return dataclasses.replace(x, scattered_as=_codes(found), reason=reason)

    params, grads = jax.tree.map(gathered, params), jax.tree.map(scattered, grads)
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True))
    _refuse_without_master([x for x, y in pairs if x.gathered_as or y.scattered_as], master, wire)
    if any(y.scattered_as for _, y in pairs):
        refuse_mixed_axes(grads, nodes, wire.named, has_order=True)
    return params, grads


def _codes(found: BlockCodes | str) -> BlockCodes | None:
    return found if isinstance(found, BlockCodes) else None


def _how(layout: Layout, dtype: str | Quantized | None, scatters: bool) -> BlockCodes | str:
    """Returns how a sharded array is sent, or why it is sent as it is."""
    local = layout.local()
    layers = 1 if local.scan_dim is None else max(1, local.shape[local.scan_dim])
    if dtype is None:
        return "no dtype is given for it"
    if not is_floating(layout.dtype):
        return f"{layout.dtype} is not floating"
    if local.size // layers < SMALLEST:
        return f"fewer than {SMALLEST:,} elements"
    free = {d: size for d, size in enumerate(local.shape) if d not in (local.dim, local.scan_dim)}
    dim = max(free, key=lambda d: (free[d], d), default=None)
    if dim is None or free[dim] < SHORTEST:
        return f"no unsharded dimension of {SHORTEST} or more"
    quantized = dtype if isinstance(dtype, Quantized) else Quantized(dtype)
    return quantized.codes(dim - len(local.shape), scatters)


def _refuse_without_master(
    layouts: Sequence[Layout], master: Mapping[str, Layout], wire: Wire
) -> None:
    narrow = [x for x in layouts if master.get(x.path, x).dtype.itemsize < 4]
    if narrow:
        named = some([f"{x.path} ({x.dtype})" for x in narrow], most=3)
        raise GShardError(
            f"{wire.named}: {named}: there is no float32 copy for the optimizer to update. Without "
            "it small updates are lost already, and rounding what is sent would lose more of them. "
            "Store the parameters in float32 and compute in another dtype: precision='bfloat16', "
            "or Precision(param_dtype='float32'). Or send these as they are: "
            "wire_exceptions={pattern: None}."
        )


def refuse_mixed_axes(
    grads: Any, nodes: Nodes, named: str = "scatter_dtype", has_order: bool = False
) -> None:
    """Refuses an all-to-all in which devices of a node all send to all other nodes.

    `grads` are the layouts of gradients; `named` is the argument that quantizes them. `has_order`
    says that the shard axes are in the order in which a real mesh has them.
    """
    sent = [x.group for x in jax.tree.leaves(grads) if x.scattered_as is not None]
    if not sent:
        return
    group = max(sent, key=lambda x: len(x.shard))  # those of kept arrays have fewer axes
    crossed = [axis for axis in group.shard if nodes.crosses(axis)]
    for axis in crossed:
        if nodes.mixes(axis):
            count, size = nodes.count, len(nodes.of_device)
            raise GShardError(
                f"{named}: the shard axis {axis!r} has several devices of each of several "
                "nodes. Quantized gradients are exchanged by an all-to-all along each axis; along "
                "this one it would send several times as many bytes between nodes as a "
                "reduce-scatter in bfloat16. Give the nodes an axis of their own: "
                f"gshard.make_mesh({{'node': {count}, 'local': {size // count}}}). Or keep a "
                f"replica of the state on each node: replica={count}. Or leave {named} out."
            )
    within = [axis for axis in group.shard if axis not in crossed and has_order]
    if within and group.shard[: len(within)] != tuple(within):
        raise GShardError(
            f"{named}: gradients are scattered over the shard axes {group.shard} in this "
            f"order, and {crossed[0]!r} is between nodes: the full gradient would be sent there. "
            f"Name the axes within a node first: shard_axes={(*within, *crossed)}, or leave "
            "shard_axes= out."
        )


def warn_of_wire(
    params: Sequence[Layout], grads: Sequence[Layout], wire: Wire | None, level: Level
) -> None:
    """Warns of dtypes to send arrays in that change nothing, or little."""
    if wire is None:
        return
    sharded = [
        (x.local(), y.local()) for x, y in zip(params, grads, strict=True) if y.dim is not None
    ]
    if not sharded:
        alone = " on one device" if params and all(x.group.size == 1 for x in params) else ""
        warn(f"{wire.named} changes nothing: no array is sharded at level {level.name!r}{alone}.")
        return
    if wire.gather and not wire.scatter and not level.shards_params:
        warn(
            f"{wire.named} changes nothing at level {level.name!r}, where the loss gathers no "
            "parameter, and updated parameters are gathered as they are. Use level 'p_g_os', or "
            "scatter_dtype=."
        )
        return
    _warn_of_exceptions(params, grads, wire)
    if not any(x.gathered_as or y.scattered_as for x, y in sharded) and all(
        wire.dtype(y.path, name) is None for _, y in sharded for name in (wire.gather, wire.scatter)
    ):
        warn(f"{wire.named} changes nothing: wire_exceptions= has None for every sharded array.")
        return
    plain = [
        y
        for x, y in sharded
        if (wire.dtype(y.path, wire.scatter) and not y.scattered_as)
        or (level.shards_params and wire.dtype(x.path, wire.gather) and not x.gathered_as)
    ]
    share = sum(x.size for x in plain) / sum(y.size for _, y in sharded)
    if share > 0.05:
        named = some([f"{x.path} {list(x.shape)}" for x in plain], most=3)
        warn(
            f"{wire.named}: {share:.0%} of the sharded parameters are sent as they are: {named}. "
            f"Only {_CONDITIONS} are quantized; rules= of shard_train_state may shard another "
            "dimension."
        )


def _warn_of_exceptions(params: Sequence[Layout], grads: Sequence[Layout], wire: Wire) -> None:
    """Warns of patterns that ask for a dtype where no array can be quantized."""
    quantized = {x.path for x in (*params, *grads) if x.gathered_as or x.scattered_as}
    for text, dtype in wire.exceptions.items():
        paths = [x.path for x in params if re.search(text, x.path)]
        if dtype is not None and paths and quantized.isdisjoint(paths):
            warn(
                f"wire_exceptions[{text!r}]={dtype!r} changes nothing: {some(paths, most=3)} "
                f"cannot be quantized. Only {_CONDITIONS} are."
            )
