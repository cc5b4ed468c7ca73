"""The collectives of parameters and gradients: all-gather, reduce-scatter, all-reduce.

Those of a loss are in `examples` and in `gshard.sequence.collectives`, the all-to-alls of quantized
gradients in `quantized`, and those of an optimizer's matrices in `owners`.

All functions run inside a `shard_map` over the data axes. A shard group of several mesh axes is
gathered minor to major and scattered major to minor, one ring of a torus after the other; the other
order would permute the shards silently. Model-parallel axes of an array are manual as well
(`on_model_axes`); otherwise XLA would first gather it over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from gshard._util.gloo import reduce_scatter
from gshard.sharding.group import Group, Hop
from gshard.sharding.layout import Layout
from gshard.train.comm.buckets import (
    assign_buckets,
    is_gathered_by_layer,
    map_in_buckets,
    ordered_buckets,
    pack,
    split_packed,
    unpack,
)
from gshard.train.comm.quantized import packed, scatter_quantized, unpacked


def gather(shard: jax.Array, layout: Layout, purpose: str = "gather") -> jax.Array:
    """All-gathers one leaf: from this device's shard to the full array of logical shape."""
    if layout.dim is None:
        return shard
    hops, local = layout.group.hops, layout.local()

    def gathered(xs: list[jax.Array]) -> list[jax.Array]:
        return [
            unpacked(_all_gather(packed(x, local), hops, layout.dim), local, x.dtype) for x in xs
        ]

    return layout.unpad(_communicated(gathered, [shard], [layout], purpose)[0])


def gather_across(shard: jax.Array, layout: Layout, n: int, purpose: str = "gather") -> jax.Array:
    """Runs the first half of `gather`: to one shard of every sub-group of `n` devices, in order.

    A quantized leaf stays packed, so that nobody rounds again what its owner has rounded.
    """
    hops = layout.group.sub_group(n)[0]

    def gathered(xs: list[jax.Array]) -> list[jax.Array]:
        return [_all_gather(packed(x, layout), hops, layout.dim) for x in xs]

    return _communicated(gathered, [shard], [layout], purpose)[0]


def gather_within(kept: jax.Array, layout: Layout, n: int, purpose: str = "gather") -> jax.Array:
    """Runs the second half of `gather`: from the result of `gather_across` to the full array."""
    group, dim, local = layout.group, layout.dim or 0, layout.local()
    across, within = group.sub_group(n)

    def gathered(xs: list[jax.Array]) -> list[jax.Array]:
        return [unpacked(_all_gather(x, within, dim), local, layout.dtype) for x in xs]

    full = _communicated(gathered, [kept], [layout], purpose)[0]
    # What the last hop has gathered is major. The parts of an axis that both halves gather are
    # ordered by sub-group, then within it.
    major = [(group.shard.index(hop.axis), hop in within, hop.size) for hop in across + within]
    major.reverse()
    order = sorted(range(len(major)), key=lambda i: major[i][:2])
    before, after = full.shape[:dim], full.shape[dim + 1 :]
    parts = full.reshape(*before, *(size for *_, size in major), -1, *after)
    last = range(dim + len(major), parts.ndim)
    parts = parts.transpose(*range(dim), *(dim + i for i in order), *last)
    return layout.unpad(parts.reshape(full.shape))


def gather_into(
    old: jax.Array, shard: jax.Array, layout: Layout, purpose: str = "gather"
) -> jax.Array:
    """All-gathers a stack layer by layer, into the memory of the full array that it replaces.

    On GPU an array that is gathered along another dimension than the first has that dimension first
    in memory, and is then copied into its own order: a stack gathered at once would need its memory
    twice. A layer is in order as soon as it is gathered.
    """

    def layer_by_layer(leaves: list[jax.Array]) -> list[jax.Array]:
        old, shard = leaves
        dim = layout.dim or 0
        stack = old.reshape(-1, *old.shape[dim:])

        def layer(stack: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            full = _all_gather(x[1], layout.group.hops, 0)
            full = lax.slice_in_dim(full, 0, old.shape[dim])
            return lax.dynamic_update_index_in_dim(stack, full, x[0], 0), None

        layers = jnp.arange(stack.shape[0]), shard.reshape(-1, *shard.shape[dim:])
        return [lax.scan(layer, stack, layers)[0].reshape(old.shape), shard]

    return _communicated(layer_by_layer, [old, shard], [layout, layout], purpose)[0]


def scatter(full: jax.Array, layout: Layout, seed: jax.Array | None = None) -> jax.Array:
    """Reduce-scatters one leaf: from the full array of logical shape to this device's shard.

    `seed`, a uint32 scalar, is that of stochastic rounding.
    """
    if layout.dim is None:
        return full

    def sums(xs: list[jax.Array], seed: jax.Array | None = None) -> list[jax.Array]:
        if layout.scattered_as is not None:
            return scatter_quantized(xs, [layout], seed)
        return [_psum_scatter(x, layout.group, layout.dim) for x in xs]

    return _communicated(sums, [layout.pad(full)], [layout], "scatter", seed)[0]


def gather_bucket(
    shards: Sequence[jax.Array], layouts: Sequence[Layout], purpose: str = "gather"
) -> list[jax.Array]:
    """All-gathers several sharded leaves of one dtype and group in one collective."""
    local = [layout.local() for layout in layouts]
    group = local[0].group

    sent = [layout.packed(layout.gathered_as) for layout in local]

    def gathered(shards: list[jax.Array]) -> list[jax.Array]:
        codes = [packed(x, layout) for x, layout in zip(shards, local, strict=True)]
        rows = [pack(x, layout, 1) for x, layout in zip(codes, sent, strict=True)]
        row = _all_gather(jnp.concatenate(rows, axis=1), group.hops, 0)
        split = zip(split_packed(row, rows), sent, local, shards, strict=True)
        return [
            layout.unpad(unpacked(unpack(r, bits, group.size), layout, x.dtype))
            for r, bits, layout, x in split
        ]

    return _communicated(gathered, shards, layouts, purpose)


def scatter_bucket(
    full: Sequence[jax.Array], layouts: Sequence[Layout], seed: jax.Array | None = None
) -> list[jax.Array]:
    """Reduce-scatters several sharded leaves of one dtype and group in one collective."""
    local = [layout.local() for layout in layouts]
    group = local[0].group

    def scattered(full: list[jax.Array], seed: jax.Array | None = None) -> list[jax.Array]:
        pairs = zip(full, local, strict=True)
        if local[0].scattered_as is not None:
            return scatter_quantized([x.pad(y) for y, x in pairs], local, seed)
        rows = [pack(layout.pad(x), layout, group.size) for x, layout in pairs]
        row = _psum_scatter(jnp.concatenate(rows, axis=1), group, 0)
        split = zip(split_packed(row, rows), local, strict=True)
        return [unpack(r, layout, 1) for r, layout in split]

    return _communicated(scattered, full, layouts, "scatter", seed)


def _communicated(
    fun: Callable[..., list[jax.Array]],
    leaves: Sequence[jax.Array],
    layouts: Sequence[Layout],
    purpose: str,
    seed: jax.Array | None = None,
) -> list[jax.Array]:
    """Runs `fun(leaves)`, a collective of one group, under the name of its purpose in profiles."""
    specs = [layout.model_spec for layout in layouts]
    with jax.named_scope(f"gshard/{purpose}"):
        return on_model_axes(fun, leaves, specs, layouts[0].group, seed)


def on_model_axes(
    fun: Callable[..., list[jax.Array]],
    leaves: Sequence[jax.Array],
    specs: Sequence[jax.P],
    group: Group,
    seed: jax.Array | None = None,
) -> list[jax.Array]:
    """Calls `fun(leaves)`, or `fun(leaves, seed)`, with the model-parallel axes manual too.

    `fun` maps arrays to as many arrays with the same sharding over these axes, which `specs` say;
    it sees the shapes of `Layout.local`.
    """
    more = () if seed is None else (seed,)
    if not group.model_axes or not leaves:
        return fun(list(leaves), *more)
    return jax.shard_map(
        fun,
        in_specs=(list(specs), *(jax.P() for _ in more)),
        out_specs=list(specs),
        axis_names={name for name, _ in group.model_axes},
        check_vma=False,
    )(list(leaves), *more)


def slice_shards(full: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
    """Slices this device's shards from full leaves, without communication."""
    starts: dict[Any, jax.Array] = {}  # in elements, by group and size of a shard

    def shard(x: jax.Array, layout: Layout) -> jax.Array:
        if layout.dim is None:
            return x
        size = layout.shard_shape[layout.dim]
        key = layout.group.shard, size
        if key not in starts:
            starts[key] = group_index(layout.group.shard) * size
        x = layout.pad(x)
        zero = np.zeros((), starts[key].dtype)  # JAX would make a 0 an int64 under jax_enable_x64
        begin = [starts[key] if d == layout.dim else zero for d in range(x.ndim)]
        sizes = [size if d == layout.dim else n for d, n in enumerate(x.shape)]
        return lax.dynamic_slice(x, begin, sizes, allow_negative_indices=False)

    return [shard(x, layout) for x, layout in zip(full, layouts, strict=True)]


def group_index(axes: Sequence[str]) -> jax.Array:
    """Returns this device's index along `axes`, major to minor, as int32."""
    return lax.axis_index(tuple(axes))


def scatter_leaves(
    full: Sequence[jax.Array],
    layouts: Sequence[Layout],
    bucket_size: int,
    seed: jax.Array | None = None,
) -> list[jax.Array]:
    """Reduce-scatters many leaves in buckets; leaves with a replicated layout pass through."""
    alone, several = partial(scatter, seed=seed), partial(scatter_bucket, seed=seed)
    return map_in_buckets(full, layouts, bucket_size, alone, several)


def all_gather_updated(
    shards: Sequence[jax.Array],
    layouts: Sequence[Layout],
    bucket_size: int,
    purpose: str = "update",
    into: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """All-gathers many updated leaves in buckets: from local shards to full arrays.

    `into` are the full arrays that the results replace; large stacks are gathered in their memory.
    """
    out, rest = list(shards), []
    for i, layout in enumerate(layouts):
        if into and is_gathered_by_layer(layout):
            out[i] = gather_into(into[i], shards[i], layout, purpose)
        else:
            rest.append(i)
    alone, several = partial(gather, purpose=purpose), partial(gather_bucket, purpose=purpose)
    chosen, layouts = [shards[i] for i in rest], [layouts[i] for i in rest]
    found = map_in_buckets(chosen, layouts, bucket_size, alone, several)
    for i, x in zip(rest, found, strict=True):
        out[i] = x
    return out


def broadcast_from_owners(
    leaves: Sequence[jax.Array], owners: Sequence[int], axes: Sequence[str]
) -> list[jax.Array]:
    """Broadcasts every leaf from its owner, an index along `axes`, with one all-reduce each."""
    index = group_index(axes)
    with jax.named_scope("gshard/update"):
        return [
            lax.psum(jnp.where(index == owner, x, jnp.zeros_like(x)), tuple(axes))
            for x, owner in zip(leaves, owners, strict=True)
        ]


def all_gather_vector(row: jax.Array, axes: Sequence[str]) -> jax.Array:
    """All-gathers one vector of each device along `axes`, to shape `(devices, length)`."""
    with jax.named_scope("gshard/update"):
        return lax.all_gather(row, tuple(axes))


def reduce_leaves(
    leaves: Sequence[jax.Array],
    axes: Sequence[str],
    bucket_size: int,
    purpose: str = "reduce",
    reduce: Callable[..., Any] = lax.psum,
) -> list[jax.Array]:
    """All-reduces many leaves over `axes`, in flat buckets of one dtype; sums by default."""
    return _reduced(leaves, axes, bucket_size, purpose, reduce, ())[0]


def reduce_bucket_by_bucket(
    leaves: Sequence[jax.Array], axes: Sequence[str], bucket_size: int, end_bucket_size: int
) -> list[jax.Array]:
    """Sums leaves in `ordered_buckets`, which XLA does not merge."""
    out, before = list(leaves), ()
    for bucket in ordered_buckets([x.size for x in leaves], bucket_size, end_bucket_size):
        chosen = [leaves[i] for i in bucket]
        sums, before = _reduced(chosen, axes, bucket_size, "reduce", lax.psum, before)
        for i, x in zip(bucket, sums, strict=True):
            out[i] = x
    return out


def _reduced(
    leaves: Sequence[jax.Array],
    axes: Sequence[str],
    bucket_size: int,
    purpose: str,
    reduce: Callable[..., Any],
    after: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums and what each collective returned; none starts before `after` is known."""
    if _one_device(axes):
        return list(leaves), []

    def total(x: jax.Array) -> jax.Array:
        with jax.named_scope(f"gshard/{purpose}"):
            results.append(reduce(_not_before(x, after), tuple(axes)))
        return results[-1]

    out, results = list(leaves), []
    for bucket in assign_buckets([x.size for x in leaves], [x.dtype for x in leaves], bucket_size):
        if len(bucket) == 1:
            out[bucket[0]] = total(leaves[bucket[0]])
            continue
        rows = [leaves[i].reshape(1, -1) for i in bucket]
        row = total(jnp.concatenate(rows, axis=1))
        for i, r in zip(bucket, split_packed(row, rows), strict=True):
            out[i] = r.reshape(leaves[i].shape)
    return out, results


def _not_before(x: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, made to depend on `after`; else XLA merges all-reduces, also across barriers."""
    if not after or not x.size:
        return x
    known = [jnp.real(a.ravel()[0]).astype(jnp.float32) for a in after if a.size]
    never = jnp.any(jnp.stack(known) > jnp.inf) if known else False
    start = (0,) * x.ndim
    first = lax.slice(x, start, (1,) * x.ndim)
    return lax.dynamic_update_slice(x, jnp.where(never, jnp.zeros_like(first), first), start)


def reduce_scalar(x: jax.Array, axes: Sequence[str], by: str = "sum") -> jax.Array:
    """Computes the `sum`, `max` or `min` over `axes`; NaN if any of the values is NaN.

    An array, such as new state that the loss returns, has a purpose of its own in profiles.
    """
    if _one_device(axes):
        return x
    with jax.named_scope("gshard/agree" if jnp.ndim(x) else "gshard/scalar"):
        if by == "sum":
            return lax.psum(x, tuple(axes))
        return extreme(x, tuple(axes), lax.pmax if by == "max" else lax.pmin)


def reduce_vector(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Computes the sum over `axes` of a few scalars, in one collective."""
    if _one_device(axes):
        return x
    with jax.named_scope("gshard/scalar"):
        return lax.psum(x, tuple(axes))


def _one_device(axes: Sequence[str]) -> bool:
    """Whether the axes have one device, so that no collective is needed; XLA would keep it."""
    return math.prod(lax.axis_size(axis) for axis in axes) == 1


def extreme(x: jax.Array, axes: tuple[str, ...], reduce: Callable[..., Any] = lax.pmax) -> Any:
    """Computes the elementwise maximum, or minimum; NaN if any of the values is NaN."""
    found = reduce(x, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    # A collective maximum ignores NaN: always on CPU, elsewhere depending on the library.
    return jnp.where(lax.pmax(jnp.isnan(x), axes), jnp.nan, found)


def _all_gather(x: jax.Array, hops: Sequence[Hop], dim: int | None) -> jax.Array:
    for hop in hops:
        x = lax.all_gather(x, hop.axis, axis=dim or 0, tiled=True, axis_index_groups=hop.groups)
    return x


def _psum_scatter(x: jax.Array, group: Group, dim: int | None) -> jax.Array:
    x = _scattered_dim_before_last(x, dim or 0) if group.platform == "tpu" else x
    for axis in group.shard:
        x = reduce_scatter(x, axis, dim or 0)
    return x


def _scattered_dim_before_last(x: jax.Array, dim: int) -> jax.Array:
    """Stores an array so that the dimension to be scattered is not the last one in memory.

    Along that one XLA makes an all-reduce on TPU, which sends twice as much. The gradient of a
    batched product, such as that of experts, often comes transposed.
    """
    if not dim or x.ndim < 3:  # XLA chooses well
        return x
    order = [*range(x.ndim)]
    if dim == order[-1]:
        order[-2:] = reversed(order[-2:])
    return with_layout_constraint(x, MemoryLayout(major_to_minor=tuple(order)))
