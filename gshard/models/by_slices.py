"""Causal attention and cross-entropy that go over slices of the sequence, and need little memory.

Letters in names: B sequences, T tokens of each, D width, H heads, K heads of keys and values, each
for G heads of queries, E features of a head, V vocabulary, N slices of C tokens.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gshard.models.training import need

SLICE = 128  # tokens, at most; a shorter sequence is one slice
_NARROW = 32  # slices whose gradients are added up in the dtype of what they all read


def slice_of(tokens: int) -> int:
    """Tokens of a slice; the last is padded where equal slices would be twice as many."""
    need(tokens > 0, "a sequence must have at least 1 token")
    fewest = -(-tokens // SLICE)
    count = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return -(-tokens // count)


def slices(x_BxTx: jax.Array, size: int) -> jax.Array:
    """(B, T, ...) to (N, B, C, ...): what a scan over slices of the sequence iterates over."""
    if missing := -x_BxTx.shape[1] % size:
        x_BxTx = jnp.pad(x_BxTx, [(0, missing if dim == 1 else 0) for dim in range(x_BxTx.ndim)])
    x_BxNxCx = x_BxTx.reshape(x_BxTx.shape[0], -1, size, *x_BxTx.shape[2:])
    return jnp.moveaxis(x_BxNxCx, 1, 0)


def _joined(x_NxBxCx: jax.Array, tokens: int) -> jax.Array:
    """(N, B, C, ...) to (B, T, ...): undoes `slices`."""
    _, B, _, *rest = x_NxBxCx.shape
    return jnp.moveaxis(x_NxBxCx, 0, 1).reshape(B, -1, *rest)[:, :tokens]


def attend(
    q_BxTxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, size: int
) -> jax.Array:
    """Causal attention, a slice of queries at a time; K divides H."""
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxTxKxE.shape[2]
    q_BxTxKxGxE = q_BxTxHxE.reshape(B, T, K, H // K, E)
    dtypes = k_BxTxKxE.dtype, v_BxTxKxE.dtype
    if T > _NARROW * size:  # the loop adds up gradients in the dtype of what it reads
        wide = [jnp.promote_types(dtype, jnp.float32) for dtype in dtypes]
        k_BxTxKxE, v_BxTxKxE = k_BxTxKxE.astype(wide[0]), v_BxTxKxE.astype(wide[1])

    @jax.checkpoint
    def of_slice(start, q_BxCxKxGxE):
        k, v = k_BxTxKxE.astype(dtypes[0]), v_BxTxKxE.astype(dtypes[1])
        scores_BxKxGxCxT = jnp.einsum(
            "BCKGE,BTKE->BKGCT", q_BxCxKxGxE, k, preferred_element_type=jnp.float32
        )
        seen_CxT = start + jnp.arange(size)[:, None] >= jnp.arange(T)
        weights_BxKxGxCxT = nn.softmax(jnp.where(seen_CxT, scores_BxKxGxCxT * E**-0.5, -1e30))
        y_BxCxKxGxE = jnp.einsum("BKGCT,BTKE->BCKGE", weights_BxKxGxCxT.astype(v.dtype), v)
        return start + size, y_BxCxKxGxE

    _, y_NxBxCxKxGxE = jax.lax.scan(of_slice, 0, slices(q_BxTxKxGxE, size))
    return _joined(y_NxBxCxKxGxE, T).reshape(B, T, H, E)


def _cross_entropy(x_BxTxD, head_DxV, next_BxT, size: int) -> jax.Array:
    """Cross-entropy of the next tokens, summed over each sequence, a slice of tokens at a time.

    It is NaN, and so is its gradient, if a next token is not from 0 to V - 1.

    What the backward pass keeps of a slice is the logarithm of its normalizer. It also makes the
    backward pass wait for the forward pass: otherwise a compiler may compute the loss, which
    nothing but the log needs, at the very end, and keep the whole head until then.
    """
    return _cross_entropy_forward(x_BxTxD, head_DxV, next_BxT, size)[0]


def _cross_entropy_forward(x_BxTxD, head_DxV, next_BxT, size: int):
    T, V = x_BxTxD.shape[1], head_DxV.shape[1]
    next_BxT = next_BxT.astype(jnp.int32)  # one_hot counts in the dtype of labels: uint8 wraps

    def of_slice(sum_B, walked):
        x_BxCxD, next_BxC, *real = walked
        logits_BxCxV = jnp.matmul(x_BxCxD, head_DxV, preferred_element_type=jnp.float32)
        norm_BxC = nn.logsumexp(logits_BxCxV, axis=-1)
        # The backward pass uses it too: both are NaN for a label that is not in the vocabulary.
        norm_BxC = jnp.where((next_BxC >= 0) & (next_BxC < V), norm_BxC, jnp.nan)
        right_BxC = jnp.take_along_axis(logits_BxCxV, next_BxC[..., None], axis=-1)[..., 0]
        loss_BxC = norm_BxC - right_BxC
        for real_1xC in real:  # only if the last slice is padded
            loss_BxC *= real_1xC
        return sum_B + loss_BxC.sum(1), norm_BxC

    nothing_B = jnp.zeros(x_BxTxD.shape[0], jnp.float32)
    walked = [slices(x_BxTxD, size), slices(next_BxT, size)]
    if T % size:
        walked.append(slices(jnp.ones((1, T), jnp.float32), size))
    sum_B, norm_NxBxC = jax.lax.scan(of_slice, nothing_B, walked)
    return sum_B, (x_BxTxD, head_DxV, next_BxT, norm_NxBxC)


def _cross_entropy_backward(size: int, kept, d_sum_B):
    x_BxTxD, head_DxV, next_BxT, norm_NxBxC = kept
    V, dtype = head_DxV.shape[1], head_DxV.dtype

    def of_slice(d_head_DxV, walked):
        x_BxCxD, next_BxC, norm_BxC = walked
        logits_BxCxV = jnp.matmul(x_BxCxD, head_DxV, preferred_element_type=jnp.float32)
        d_BxCxV = jnp.exp(logits_BxCxV - norm_BxC[..., None]) - jax.nn.one_hot(next_BxC, V)
        d_BxCxV = (d_BxCxV * d_sum_B[:, None, None]).astype(dtype)
        d_head_DxV += jnp.einsum(
            "BCD,BCV->DV", x_BxCxD, d_BxCxV, preferred_element_type=d_head_DxV.dtype
        )
        return d_head_DxV, jnp.einsum("BCV,DV->BCD", d_BxCxV, head_DxV)

    walked = slices(x_BxTxD, size), slices(next_BxT, size), norm_NxBxC
    # A sum of many slices in bfloat16 stops growing: at 32,768 tokens it is off by 5 %.
    wide = jnp.float32 if norm_NxBxC.shape[0] > _NARROW else dtype
    d_head_DxV, d_x_NxBxCxD = jax.lax.scan(of_slice, jnp.zeros_like(head_DxV, wide), walked)
    return _joined(d_x_NxBxCxD, x_BxTxD.shape[1]), d_head_DxV.astype(dtype), None


cross_entropy: Any = jax.custom_vjp(_cross_entropy, nondiff_argnums=(3,))
cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
