"""Attention over a sharded sequence: each device's queries meet the keys of one device at a time.

Around the ring, the keys and values of the device before arrive while those at hand are used, and
S-1 hops bring all of them past (Liu et al. 2023, Ring Attention, arXiv 2310.01889). In the backward
pass they go round once more, with the gradients of each slice behind it. With `gathered`, they come
from one all-gather instead, and gradients go home by one reduce-scatter. Either way the forward
pass keeps only what a device owns: its queries, keys, values and outputs, whatever S is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from gshard.sequence.blocks import Attend, Blocks, Keys, Known, Masking, Pairs, Queries, Softmax
from gshard.sequence.collectives import gather, index, rotate, scatter_sum
from gshard.sequence.order import positions_of

SAVED = "sequence_attention"  # the name of outputs and normalisers, for a policy of remat
EVEN = "half_of_the_devices"  # the scope of hops of which devices skip as many as they take
UNROLLED = 8  # hops that differ in what they see; a loop beyond


@dataclass(frozen=True)
class Ring:
    """What is known of the attention before the program runs."""

    axis: str
    devices: int
    zigzag: bool
    gathered: bool
    masking: Masking
    scale: float
    blocks: Blocks

    @property
    def attend(self) -> Attend:
        """The attention of a slice to a slice."""
        return Attend(self.blocks, self.masking, self.scale)

    @property
    def tokens(self) -> int:
        """Of a slice."""
        return self.blocks.parts * self.blocks.length

    @property
    def chains(self) -> list[tuple[int, int]]:
        """(direction, hops): keys come from `hops` devices before, or after, this one."""
        every, window = self.devices - 1, self.masking.window
        if not every or window is None or self.zigzag:
            return [(1, every)] if every else []
        reach = min(every, -(-(window - 1) // self.tokens))
        if self.masking.causal:
            return [(1, reach)] if reach else []
        if 2 * reach >= every:
            return [(1, every)]
        return [(1, reach), (-1, reach)] if reach else []

    @property
    def unrolled(self) -> int:
        """The largest number of hops that are unrolled; more run in a loop.

        Equal hops run in a loop, since unrolled ones cost time to compile and, on CPUs, memory. The
        hops of a window differ, and in a loop each of them would compute what any of them needs.
        """
        return 1 if self.masking.window is None or self.zigzag else UNROLLED

    def own_pairs(self) -> Pairs:
        """The blocks that meet of a device's queries and its own keys."""
        parts = range(self.blocks.parts)
        found = [self.blocks.near_pairs(self.masking, 0, part) for part in parts]
        if self.zigzag:
            found.append(self.blocks.all_pairs([1], [0]))
            if not self.masking.causal:
                found.append(self.blocks.all_pairs([0], [1]))
        return tuple(pair for pairs in found for pair in pairs)

    def pairs(self, shift: Any) -> tuple[Pairs, Pairs]:
        """The blocks that meet after `shift` hops: of keys that did not wrap around, and that did.

        A device i has the keys of i - shift, or beyond the ends of the row of devices those of
        i - shift + S (or - S), which lie on its other side.
        """
        parts = range(self.blocks.parts)
        every = self.blocks.all_pairs(parts, parts)
        if self.zigzag:
            if not self.masking.causal:
                return every, every
            # Keys of an earlier device: their first half is before all queries, their second half
            # after. Keys of a later device: both halves are between the two of the queries.
            return self.blocks.all_pairs(parts, [0]), self.blocks.all_pairs([1], parts)
        if not isinstance(shift, int):  # in a loop over hops
            return every, () if self.masking.causal else every
        around = self.devices if shift > 0 else -self.devices
        distances = shift * self.tokens, (shift - around) * self.tokens
        near, wrapped = (self.blocks.near_pairs(self.masking, x) for x in distances)
        return near, wrapped


class Inputs(NamedTuple):
    """Arrays without gradients: of the keys of every device, in the order of the devices."""

    segments_BxSxk: jax.Array | None
    mask: jax.Array | None  # (B or 1, K or 1, G or 1, q, S, k)
    own: Any = None  # the index of this device, where it is needed


def _attend_around(
    ring: Ring, q_BxqxKxGxE: jax.Array, kv_BxkxKxF: jax.Array, inputs: Inputs
) -> jax.Array:
    """Attention of this device's queries to all keys; the output has the dtype of the queries.

    A key and its value are one array, so that a hop is one permute: F is the features of both.
    """
    return _forward(ring, q_BxqxKxGxE, kv_BxkxKxF, inputs)[0]


def _forward(
    ring: Ring, q_BxqxKxGxE: jax.Array, kv_BxkxKxF: jax.Array, inputs: Inputs
) -> tuple[jax.Array, Any]:
    kept = q_BxqxKxGxE, kv_BxkxKxF, inputs
    inputs = _with_own(ring, inputs)
    # Masks must depend on the queries: what does not change in a loop over layers, JAX computes
    # before it and keeps, and these are the masks of all blocks.
    q_BxqxKxGxE, inputs = _together((q_BxqxKxGxE, inputs))
    queries = _queries(ring, q_BxqxKxGxE, inputs)

    def visit(seen: Softmax, kv_BxkxKxF: jax.Array, shift: Any) -> Softmax:
        keys = _keys(ring, kv_BxkxKxF, inputs, shift)
        attend = partial(ring.attend.forward, queries, keys)
        return _on_pairs(ring, inputs, shift, attend, seen)

    seen = Softmax.empty(queries.q_BxqxKxGxE, kv_BxkxKxF.shape[-1] - q_BxqxKxGxE.shape[-1])
    if ring.gathered:
        seen = visit(seen, kv_BxkxKxF, 0)
        everybodys = gather(kv_BxkxKxF, ring.axis, 1)
        for direction, hops in ring.chains:

            def one(r: Any, seen: Softmax, d: int = direction) -> Softmax:
                return visit(seen, _of(ring, inputs, everybodys, r * d), r * d)

            seen = _repeat(ring, 1, hops + 1, one, seen)
    else:
        firsts = [rotate(kv_BxkxKxF, ring.axis, direction) for direction, _ in ring.chains]
        seen = visit(seen, kv_BxkxKxF, 0)
        for (direction, hops), first in zip(ring.chains, firsts, strict=True):

            def hop(r: Any, carry: Any, d: int = direction) -> Any:
                seen, kv_BxkxKxF = _together(carry)
                ahead = rotate(kv_BxkxKxF, ring.axis, d)  # before the products that overlap with it
                return visit(seen, kv_BxkxKxF, r * d), ahead

            seen, last = _repeat(ring, 1, hops, hop, (seen, first))
            seen = visit(seen, last, hops * direction)
    out, normaliser = (ring.blocks.unpadded(x) for x in seen.output())
    out = checkpoint_name(out.astype(q_BxqxKxGxE.dtype), SAVED)
    normaliser = checkpoint_name(normaliser, SAVED)
    return out, (*kept, out, normaliser)


def _backward(ring: Ring, kept: Any, d_out_BxqxKxGxE: jax.Array) -> Any:
    # Together: a compiler may else reuse what the forward pass has received, and hold all of it.
    q_BxqxKxGxE, kv_BxkxKxF, inputs, out, normaliser = kept
    kept = q_BxqxKxGxE, kv_BxkxKxF, _with_own(ring, inputs), out, normaliser
    (q_BxqxKxGxE, kv_BxkxKxF, inputs, out, normaliser), d_out = _together((kept, d_out_BxqxKxGxE))
    mean = (out.astype(normaliser.dtype) * d_out.astype(normaliser.dtype)).sum(-1)
    queries = _queries(ring, q_BxqxKxGxE, inputs)
    known = Known(*(ring.blocks.padded(x) for x in (d_out, normaliser, mean)))

    def visit(
        d_q: jax.Array, kv_BxkxKxF: jax.Array, shift: Any, third: str = "all", d_kv: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """The gradient of the queries, with this slice's part, and that of its keys and values."""
        keys = _keys(ring, kv_BxkxKxF, inputs, shift)
        d_kv = jnp.zeros_like(kv_BxkxKxF, d_q.dtype) if d_kv is None else d_kv

        def add(grads: Any, pairs: Pairs) -> Any:
            if third != "all":
                pairs = tuple(x for x in pairs if (x[1] % 3 == 0) == (third == "first"))
            return ring.attend.backward(queries, keys, known, grads, pairs)

        d_q, d_kv = _on_pairs(ring, inputs, shift, add, (d_q, ring.blocks.padded(d_kv)))
        return d_q, ring.blocks.unpadded(d_kv)

    d_q = jnp.zeros_like(queries.q_BxqxKxGxE, normaliser.dtype)
    if ring.gathered:
        everybodys = gather(kv_BxkxKxF, ring.axis, 1)
        d_q, own = visit(d_q, kv_BxkxKxF, 0)
        d_all = _set(ring, inputs, jnp.zeros_like(everybodys, d_q.dtype), own, 0)
        for direction, hops in ring.chains:

            def one(r: Any, carry: Any, d: int = direction) -> Any:
                d_q, d_all = carry
                d_q, d_kv = visit(d_q, _of(ring, inputs, everybodys, r * d), r * d)
                return d_q, _set(ring, inputs, d_all, d_kv, r * d)

            d_q, d_all = _repeat(ring, 1, hops + 1, one, (d_q, d_all))
        d_kv = scatter_sum(d_all, ring.axis, 1)
    else:
        firsts = [rotate(kv_BxkxKxF, ring.axis, direction) for direction, _ in ring.chains]
        d_q, d_kv = visit(d_q, kv_BxkxKxF, 0)
        for (direction, hops), first in zip(ring.chains, firsts, strict=True):
            d_q, d_home = _chain_backward(ring, visit, d_q, first, direction, hops)
            d_kv = d_kv + d_home
    d_q = ring.blocks.unpadded(d_q)
    return d_q.astype(q_BxqxKxGxE.dtype), d_kv.astype(kv_BxkxKxF.dtype), None


def _chain_backward(
    ring: Ring,
    visit: Callable[..., tuple[jax.Array, jax.Array]],
    d_q: jax.Array,
    first: jax.Array,
    direction: int,
    hops: int,
) -> tuple[jax.Array, jax.Array]:
    """Keys go along a chain with their gradients, one hop behind; then the gradients go home."""
    d_q, first = _together((d_q, first))
    ahead = rotate(first, ring.axis, direction) if hops > 1 else first
    d_q, d_kv = visit(d_q, first, direction)

    def hop(r: Any, carry: Any) -> Any:
        d_q, kv_BxkxKxF, d_kv = _together(carry)
        ahead = rotate(kv_BxkxKxF, ring.axis, direction)
        d_q, found = visit(d_q, kv_BxkxKxF, r * direction, "first")
        # XLA overlaps one collective at a time on GPUs: each gets its share of the products.
        d_q, found, ahead, d_kv = _together((d_q, found, ahead, d_kv))
        arrived = rotate(d_kv, ring.axis, direction)
        d_q, found = visit(d_q, kv_BxkxKxF, r * direction, "others", found)
        return d_q, ahead, arrived + found

    d_q, last, d_kv = _repeat(ring, 2, hops, hop, (d_q, ahead, d_kv))
    if hops > 1:
        d_q, last, d_kv = _together((d_q, last, d_kv))
        arrived = rotate(d_kv, ring.axis, direction)
        d_q, found = visit(d_q, last, hops * direction)
        d_kv = arrived + found
    return d_q, rotate(d_kv, ring.axis, -hops * direction)


attend_around: Any = jax.custom_vjp(_attend_around, nondiff_argnums=(0,))
attend_around.defvjp(_forward, _backward)


# ---- slices -------------------------------------------------------------------------------------


def _with_own(ring: Ring, inputs: Inputs) -> Inputs:
    own = index(ring.axis) if ring.devices > 1 else 0  # a derivative is traced elsewhere
    return inputs._replace(own=jnp.asarray(own, jnp.int32))


def _source(ring: Ring, inputs: Inputs, shift: Any) -> Any:
    """The device whose keys are at hand."""
    return (inputs.own - shift) % ring.devices


def _positions(ring: Ring, source: Any, value: int) -> jax.Array:
    order = "zigzag" if ring.zigzag else "contiguous"
    found = positions_of(source, ring.tokens, ring.devices, order)
    return ring.blocks.padded(found, 0, value)


def _queries(ring: Ring, q_BxqxKxGxE: jax.Array, inputs: Inputs) -> Queries:
    segments = _segments(ring, inputs, 0)
    positions = _positions(ring, _source(ring, inputs, 0), 0)
    return Queries(ring.blocks.padded(q_BxqxKxGxE), positions, segments)


def _segments(ring: Ring, inputs: Inputs, shift: Any) -> jax.Array | None:
    if inputs.segments_BxSxk is None:
        return None
    source = _source(ring, inputs, shift)
    own = lax.dynamic_index_in_dim(inputs.segments_BxSxk, source, 1, keepdims=False)
    return ring.blocks.padded(own)


def _keys(ring: Ring, kv_BxkxKxF: jax.Array, inputs: Inputs, shift: Any) -> Keys:
    source, mask = _source(ring, inputs, shift), inputs.mask
    if mask is not None:
        mask = lax.dynamic_index_in_dim(mask, source, 4, keepdims=False)
        mask = ring.blocks.padded(ring.blocks.padded(mask, 3), 4)
    positions, segments = _positions(ring, source, -1), _segments(ring, inputs, shift)
    return Keys(ring.blocks.padded(kv_BxkxKxF), positions, segments, mask)


def _of(ring: Ring, inputs: Inputs, everybodys: jax.Array, shift: Any) -> jax.Array:
    """The slice of the device `shift` places before this one."""
    start = _source(ring, inputs, shift) * ring.tokens
    return lax.dynamic_slice_in_dim(everybodys, start, ring.tokens, 1)


def _set(
    ring: Ring, inputs: Inputs, everybodys: jax.Array, own: jax.Array, shift: Any
) -> jax.Array:
    """The slices of all devices with another one for the device `shift` places before this one."""
    return lax.dynamic_update_slice_in_dim(
        everybodys, own, _source(ring, inputs, shift) * ring.tokens, axis=1
    )


def _on_pairs(
    ring: Ring, inputs: Inputs, shift: Any, add: Callable[[Any, Pairs], Any], carry: Any
) -> Any:
    """Adds the pairs of blocks that meet; devices may differ, but none communicates in here."""
    if isinstance(shift, int) and shift == 0:
        return add(carry, ring.own_pairs())
    near, wrapped = ring.pairs(shift)
    if near == wrapped:
        return add(carry, near)
    before = inputs.own - shift
    on_this_side = (before >= 0) & (before < ring.devices)
    # Over all hops, as many devices take one side as the other: so FLOPs are counted (MFU).
    scope = nullcontext() if ring.masking.window else jax.named_scope(EVEN)
    with scope:
        return lax.cond(on_this_side, lambda x: add(x, near), lambda x: add(x, wrapped), carry)


def _repeat(ring: Ring, start: int, end: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`body(r, carry)` for every r; a loop only if there are many."""
    if end - start > ring.unrolled:
        return lax.fori_loop(start, end, body, carry)
    for r in range(start, end):
        carry = body(r, carry)
    return carry


def _together(carry: Any) -> Any:
    """Ends a hop: a compiler may else do all hops first, and hold the keys of all devices."""
    return lax.optimization_barrier(carry)
