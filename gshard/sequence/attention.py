"""Attention of a sequence that is sharded over devices: checks, and the choice of an algorithm."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.validation import check_choice, check_integer, flag, shown
from gshard.sequence.blocks import Blocks, Masking
from gshard.sequence.collectives import exchange, gather, size
from gshard.sequence.order import Order, check_halves, slices_in_order
from gshard.sequence.ring import Inputs, Ring, attend_around
from gshard.sequence.view import of_slices

BY = ("ring", "ulysses", "gather")
IMPLEMENTATIONS = (None, "xla", "cudnn")
BLOCK, BLOCKS = 512, 256  # tokens of a block, and how many blocks before they grow


@of_slices({"q": 1, "k": 1, "v": 1, "mask": 2, "segment_ids": 1}, result=1)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    segment_ids: Any = None,
    window: int | None = None,
    scale: float | None = None,
    by: Literal["ring", "ulysses", "gather"] = "ring",
    order: Order = "contiguous",
    axis: str = "sequence",
    implementation: Literal["xla", "cudnn"] | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Self-attention over the whole sequence, of which each device has T/S tokens.

    In a train step of gshard shapes are global, as on a single device: T/S stands for T there.

    Where the axis is not bound (`model.init`, evaluation on one device) it computes the same on one
    device. No array of all scores is made, and what the backward pass keeps of a device is its
    queries, keys, values and outputs. Scores and sums are float32.

    Args:
      q: queries, (batch, T/S, heads, features).
      k: keys, (batch, T/S, kv_heads, features); heads is a multiple of kv_heads.
      v: values, (batch, T/S, kv_heads, features of a value).
      causal: a token attends to itself and those before it.
      mask: booleans, True where a query attends to a key: (batch or 1, heads or 1, T/S, T), with
        this device's queries and all keys by their positions. A query without keys gives
        zeros, or with cuDNN a mean of values.
      segment_ids: integers (batch, T/S): a token attends only to those of the same number, for
        several documents in one sequence.
      window: a token attends to itself and window - 1 tokens before it, and as many after it
        without `causal`.
      scale: factor of the scores; 1/sqrt(features) by default.
      by: "ring": keys and values pass from device to device, T/S tokens at a time, while products
        run; as few hops as `window` needs. "ulysses": an all-to-all gives each device all tokens
        of some heads, so heads must be a multiple of S. "gather": every device gathers all keys
        and values.
      order: how the sequence is split over the devices. "zigzag" balances `causal` by ring and
        gather; see `gshard.sequence.zigzag`.
      axis: the mesh axis over which the sequence is sharded.
      implementation: "cudnn" for the kernel of `jax.nn.dot_product_attention` on GPUs, with
        `by="ulysses"`, for bfloat16 or float16. It takes no `segment_ids`, and `window` with
        `causal`. By default, and with "xla", block by block.
      block_size: the most queries, and the most keys, that are multiplied at a time. Larger blocks
        need more memory, batch x heads x block_size^2 floats, and fewer operations. By default 512,
        or 1/256 of the tokens that meet if that is more.

    Returns:
      (batch, T/S, heads, features of a value), in the dtype of `q`. With a remat policy that saves
      the name "sequence_attention", the backward pass does not compute the attention again.

    Raises:
      GShardError: shapes, dtypes or sizes that do not fit, an unknown `by` or `order`, or what
        `implementation` does not have.

    Example:
      >>> x = jnp.ones((2, 6, 4, 8))
      >>> gshard.sequence.attention(x, x[:, :, :2], x[:, :, :2], causal=True).shape
      (2, 6, 4, 8)

    Sources: Ring Attention, Liu et al. 2023, arXiv 2310.01889. DeepSpeed-Ulysses, Jacobs et al.
    2023, arXiv 2309.14509.
    """
    check_choice("by", by, BY)
    devices = size(axis)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    _check_arrays(q, k, v)
    check_halves(q.shape[1], devices, order, axis)
    if window is not None:
        window = check_integer("window", window, 1, " of tokens")
    if by == "ulysses":
        _check_heads(q.shape[2], devices)
    mask = _checked_mask(mask, q, devices)
    segment_ids = _checked_segments(segment_ids, q)
    if block_size is not None:
        block_size = check_integer("block_size", block_size, 1, " of tokens")
    masking = Masking(flag("causal", causal), window)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn":
        _check_cudnn(q, v, by, masking, segment_ids)
    factor = _checked_scale(q.shape[3] ** -0.5 if scale is None else scale)
    zigzag = order == "zigzag" and devices > 1

    def around(q: Any, k: Any, v: Any, inputs: Any, devices: int, zigzag: bool) -> jax.Array:
        if implementation == "cudnn":
            return of_library(q, k, v, inputs.mask, masking, factor, "cudnn")
        tokens, kv_heads = k.shape[1:3]
        most = block_size or max(BLOCK, -(-tokens // BLOCKS))
        blocks = Blocks.of(tokens, 2 if zigzag else 1, most)
        ring = Ring(axis, devices, zigzag, by == "gather" and devices > 1, masking, factor, blocks)
        grouped = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3])
        inputs = _by_slices(inputs, devices, zigzag, kv_heads)
        out = attend_around(ring, grouped, jnp.concatenate([k, v], -1), inputs)
        return out.reshape(*q.shape[:3], v.shape[3])

    if devices == 1 or by != "ulysses":
        if devices > 1 and segment_ids is not None:
            segment_ids = gather(segment_ids, axis, 1)
        return around(q, k, v, Inputs(segment_ids, mask), devices, zigzag)

    # Each device gets all tokens of some heads. Heads of keys that several devices need are
    # repeated, as little as possible.
    repeats = math.lcm(k.shape[2], devices) // k.shape[2]
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, 2) for x in (k, v))

    def in_order(x: jax.Array, dim: int, back: bool = False) -> jax.Array:
        return _by_position(x, devices, dim, back) if zigzag else x

    q, k, v = (in_order(exchange(x, axis, 2, 1), 1) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = in_order(gather(segment_ids, axis, 1), 1)
    if mask is not None:
        shared = mask.shape[1] == 1
        mask = gather(mask, axis, 2) if shared else exchange(mask, axis, 1, 2)
        mask = in_order(mask, 2)
    out = around(q, k, v, Inputs(segment_ids, mask), 1, False)
    return exchange(in_order(out, 1, back=True), axis, 1, 2)


def of_library(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    masking: Masking,
    scale: float,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """Attention on one device by JAX's own function."""
    reach = None if masking.window is None else masking.window - 1
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=masking.causal,
        local_window_size=None if reach is None else (reach, 0 if masking.causal else reach),
        implementation=implementation,
    )


def _by_slices(inputs: Inputs, devices: int, zigzag: bool, kv_heads: int) -> Inputs:
    """The same by the device that has the keys; a mask is by positions until now."""
    segments, mask, _ = inputs
    if segments is not None:
        segments = segments.reshape(segments.shape[0], devices, -1)
    if mask is not None:
        if zigzag:
            mask = _by_position(mask, devices, 3, back=True)
        heads = (1, 1) if mask.shape[1] == 1 else (kv_heads, mask.shape[1] // kv_heads)
        mask = mask.reshape(mask.shape[0], *heads, mask.shape[2], devices, -1)
    return Inputs(segments, mask)


def _by_position(x: jax.Array, devices: int, dim: int, back: bool = False) -> jax.Array:
    """A whole sequence in the zig-zag order of the devices, by position; or `back`."""
    order = slices_in_order(devices)
    if not back:
        order = [order.index(i) for i in range(len(order))]
    pieces = jnp.split(x, len(order), dim)
    return jnp.concatenate([pieces[i] for i in order], dim)


# ---- checks -------------------------------------------------------------------------------------


def _check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise GShardError(
                f"{name} has shape {x.shape}: it needs four dimensions, (batch, tokens, heads, "
                "features)."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise GShardError(f"{name} has dtype {x.dtype}: pass floating-point numbers.")
        if x.dtype != q.dtype:
            raise GShardError(
                f"{name} has dtype {x.dtype} and q has {q.dtype}: cast them to one dtype."
            )
        if x.shape[0] != q.shape[0]:
            raise GShardError(
                f"{name} has shape {x.shape} and q has {q.shape}: the batch (dimension 0) must be "
                "equal."
            )
        if x.shape[1] != q.shape[1]:
            raise GShardError(
                f"{name} has {x.shape[1]} tokens (dimension 1) and q has {q.shape[1]}: "
                "gshard.sequence.attention computes self-attention only. For queries of another "
                "length (cross-attention, a cache of keys) use jax.nn.dot_product_attention, which "
                "works in a step with sequence= too and gathers the keys and values; or pad q or k "
                "and v, with mask= for the keys that count."
            )
    if k.shape[2] != v.shape[2]:
        raise GShardError(
            f"k has {k.shape[2]} heads (dimension 2) and v has {v.shape[2]}: they need the same."
        )
    if q.shape[3] != k.shape[3]:
        raise GShardError(
            f"q has {q.shape[3]} features (dimension 3) and k has {k.shape[3]}: they need the same."
        )
    if 0 in (*q.shape, *v.shape) or k.shape[2] == 0:
        raise GShardError(f"q {q.shape}, k {k.shape} and v {v.shape} must not be empty.")
    if q.shape[2] % k.shape[2]:
        fitting = [x for x in range(1, q.shape[2] + 1) if q.shape[2] % x == 0]
        raise GShardError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: the heads of q must be a multiple "
            f"of those of k. k may have {_listed(fitting)}."
        )


def _checked_scale(scale: Any) -> float:
    try:
        return float(scale)
    except (TypeError, ValueError) as error:  # JAX's error for a traced value is a TypeError
        raise GShardError(
            f"scale={shown(scale)} must be a number. Multiply q by a scale that is an array."
        ) from error


def _check_heads(heads: int, devices: int) -> None:
    if heads % devices:
        fitting = [x for x in range(1, heads + 1) if heads % x == 0]
        raise GShardError(
            f'by="ulysses" gives each of {devices} devices some of the heads, but q has {heads}. '
            f"Shard the sequence over {_listed(fitting)} devices, use a multiple of {devices} "
            'heads, or by="ring".'
        )


def _check_cudnn(q: jax.Array, v: jax.Array, by: str, masking: Masking, segment_ids: Any) -> None:
    """Refuses what cuDNN does not have, or what JAX does not give access to."""
    where = 'implementation="cudnn"'
    if by != "ulysses":
        raise GShardError(
            f'{where} needs by="ulysses", which gives each device all tokens of some heads; here '
            f"by={by!r}. Pass that, or leave implementation out."
        )
    if segment_ids is not None:
        raise GShardError(f"{where} takes no segment_ids: leave implementation out.")
    if masking.window is not None and not masking.causal:
        raise GShardError(
            f"{where} takes window={masking.window} only with causal=True: it has no window after "
            "a token. Leave implementation out."
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise GShardError(
            f"{where} computes in bfloat16 or float16, and q has dtype {q.dtype}: cast q, k and v."
        )
    if q.shape[3] != v.shape[3]:
        raise GShardError(
            f"{where} needs as many features in v as in q: v has {v.shape[3]} (dimension 3) and q "
            f"{q.shape[3]}."
        )


def _checked_mask(mask: Any, q: jax.Array, devices: int) -> jax.Array | None:
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    batch, tokens, heads, _ = q.shape
    wanted = ((1, batch), (1, heads), (tokens,), (tokens * devices,))
    if mask.dtype != bool:
        raise GShardError(
            f"mask has dtype {mask.dtype}: pass booleans, True to attend. flax.linen's "
            "make_causal_mask and make_attention_mask take dtype=bool; causal=True needs no mask."
        )
    if mask.ndim != 4 or any(x not in y for x, y in zip(mask.shape, wanted, strict=True)):
        queries = "queries of this device, all keys" if devices > 1 else "queries, keys"
        raise GShardError(
            f"mask has shape {mask.shape}: it must be ({batch} or 1, {heads} or 1, {tokens}, "
            f"{tokens * devices}), that is batch, heads, {queries}. Add what it lacks by "
            "mask[None, None] or jnp.broadcast_to. Padding needs no mask: pass segment_ids=, "
            "with 1 for tokens and 0 for padding."
        )
    return mask


def _checked_segments(segment_ids: Any, q: jax.Array) -> jax.Array | None:
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    if segment_ids.shape != q.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise GShardError(
            f"segment_ids is {segment_ids.dtype} of shape {segment_ids.shape}: it must be "
            f"integers of shape {q.shape[:2]}, one number for each token of q."
        )
    return segment_ids


def _listed(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    *first, last = [shown(x) for x in numbers]
    return f"{', '.join(first)} or {last}" if first else last
