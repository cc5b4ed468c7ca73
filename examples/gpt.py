"""A small byte-level GPT in Flax Linen. Nothing here knows about devices."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

BYTES = 256  # the vocabulary

# A block that adds nothing at the start lets the embedding learn first: fewer steps to real text.
START_AT_ZERO = nn.initializers.zeros


class Attention(nn.Module):
    """Causal self-attention."""

    heads: int

    @nn.compact
    def __call__(self, x_BxTxD):
        B, T, D = x_BxTxD.shape
        qkv_BxTx3D = nn.Dense(3 * D, use_bias=False, name="qkv")(x_BxTxD)
        q_BxTxHxE, k_BxTxHxE, v_BxTxHxE = jnp.split(
            qkv_BxTx3D.reshape(B, T, self.heads, 3 * D // self.heads), 3, axis=-1
        )
        y_BxTxHxE = jax.nn.dot_product_attention(q_BxTxHxE, k_BxTxHxE, v_BxTxHxE, is_causal=True)
        return nn.Dense(D, use_bias=False, kernel_init=START_AT_ZERO, name="out")(
            y_BxTxHxE.reshape(B, T, D)
        )


class Block(nn.Module):
    """Attention, then a two-layer MLP; each on a normalised copy of the stream."""

    heads: int

    @nn.compact
    def __call__(self, x_BxTxD):
        D = x_BxTxD.shape[-1]
        x_BxTxD = x_BxTxD + Attention(self.heads)(nn.LayerNorm()(x_BxTxD))
        h_BxTxF = nn.gelu(nn.Dense(4 * D, name="up")(nn.LayerNorm()(x_BxTxD)))
        return x_BxTxD + nn.Dense(D, kernel_init=START_AT_ZERO, name="down")(h_BxTxF)


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    width: int
    layers: int
    heads: int
    sequence: int
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, bytes_BxT):
        T = bytes_BxT.shape[1]
        position_TxD = self.param(
            "position", nn.initializers.normal(0.1), (self.sequence, self.width)
        )[:T]
        embed = nn.Embed(BYTES, self.width, embedding_init=nn.initializers.normal(1.0))
        x_BxTxD = embed(bytes_BxT) + position_TxD

        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        if self.scan:
            # One compiled block for all layers: every kernel is a stack of `layers` kernels.
            x_BxTxD, _ = nn.scan(
                lambda layer, x_BxTxD, _: (layer(x_BxTxD), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(block(self.heads, name="blocks"), x_BxTxD, None)
        else:
            for i in range(self.layers):
                x_BxTxD = block(self.heads, name=f"block_{i}")(x_BxTxD)

        return nn.Dense(BYTES, use_bias=False, name="unembed")(nn.LayerNorm()(x_BxTxD))


def next_byte_loss(apply_fn, params, text_BxT1):
    """Mean cross-entropy of every byte given the ones before it, in nats."""
    logits_BxTxV = apply_fn({"params": params}, text_BxT1[:, :-1])
    targets_BxT = text_BxT1[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean()


def sample(model, params, prompt: bytes, length: int, key, temperature: float = 0.8) -> bytes:
    """Continue `prompt` by `length` bytes; the model sees the last `model.sequence` of them."""
    T = model.sequence

    @jax.jit
    def next_byte(params, window_1xT, last, key):
        logits_V = model.apply({"params": params}, window_1xT)[0, last]
        return jax.random.categorical(key, logits_V / temperature)

    text = bytearray(prompt)
    for step_key in jax.random.split(key, length):
        seen = text[-T:]
        # Padded on the right, which a causal model cannot see: one shape, one compilation.
        window_1xT = jnp.asarray([seen + bytes(T - len(seen))], jnp.uint8)
        text.append(int(next_byte(params, window_1xT, len(seen) - 1, step_key)))
    return bytes(text)
