"""GPT-2 in Flax Linen (Radford et al., 2019), at any size; written as most people would write it.

Attention keeps its scores and the loss sees all logits at once. There is no dropout: one epoch is
how such a model is trained today.

Letters in names: B sequences, T tokens of each, D width, H heads, E features of a head, F width of
the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import gshard
from gshard.models.training import (
    DTYPES,
    REMAT,
    STACK,
    named,
    need,
    only_with,
    required,
    setup_of,
    stack_of,
)

START = nn.initializers.normal(0.02)


class Block(nn.Module):
    """Attention, then a two-layer MLP; each sees a normalized copy of the stream."""

    layers: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: Any) -> Any:
        B, T, D = x_BxTxD.shape
        # What is added to the stream shrinks with the number of layers that add to it.
        last = nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5)

        def dense(features: int, name: str, start=START):
            return nn.Dense(features, dtype=self.dtype, kernel_init=start, name=name)

        def norm(name: str):
            return nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name=name)

        qkv_BxTx3D = dense(3 * D, "qkv")(norm("attention_norm")(x_BxTxD))
        q_BxTxHxE, k_BxTxHxE, v_BxTxHxE = (
            part_BxTxD.reshape(B, T, self.heads, D // self.heads)
            for part_BxTxD in jnp.split(qkv_BxTx3D, 3, axis=-1)
        )
        y_BxTxHxE = jax.nn.dot_product_attention(q_BxTxHxE, k_BxTxHxE, v_BxTxHxE, is_causal=True)
        x_BxTxD += dense(D, "out", last)(y_BxTxHxE.reshape(B, T, D))

        h_BxTxF = dense(4 * D, "up")(norm("mlp_norm")(x_BxTxD))
        h_BxTxF = nn.gelu(h_BxTxF, approximate=True)
        return x_BxTxD + dense(D, "down", last)(h_BxTxF), None


class GPT2(nn.Module):
    """The mean cross-entropy of every token given the ones before it, in nats; or its logits.

    Without the next tokens it returns the logits, (B, T, V) in float32. All next tokens count; one
    that is not from 0 to V - 1, such as -100, makes the loss and its gradient NaN.

    Attributes:
      layers, width, heads: of the model; the MLP is four times as wide.
      vocabulary: tokens.
      positions: the longest sequence; each position has an embedding of its own.
      dtype: what is computed in; parameters are cast to it where they are used.
      remat: what the backward pass finds of a layer, a value of `REMAT`.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    dtype: Any = jnp.float32
    remat: Any = None

    def __post_init__(self) -> None:
        counts = self.layers, self.width, self.heads, self.vocabulary, self.positions
        need(min(counts) > 0, f"layers, width, ... = {counts} must each be at least 1")
        fits = self.width % self.heads == 0
        need(fits, f"width={self.width} must be a multiple of heads={self.heads}")
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, next_BxT: jax.Array | None = None) -> jax.Array:
        D, V, T = self.width, self.vocabulary, tokens_BxT.shape[1]
        possible = 0 < T <= self.positions
        need(possible, f"a sequence must have 1 to positions={self.positions} tokens, not {T}")
        embed = nn.Embed(V, D, dtype=self.dtype, embedding_init=START, name="embed")
        place = nn.Embed(
            self.positions, D, dtype=self.dtype, embedding_init=START, name="positions"
        )
        # As in Llama: bytes are too narrow.
        x_BxTxD = embed(tokens_BxT.astype(jnp.int32)) + place(jnp.arange(T))

        layers = stack_of(Block, self.layers, self.remat)
        x_BxTxD, _ = layers(self.layers, self.heads, self.dtype, name=STACK)(x_BxTxD, None)
        x_BxTxD = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x_BxTxD)

        logits_BxTxV = embed.attend(x_BxTxD).astype(jnp.float32)
        if next_BxT is None:
            return logits_BxTxV
        next_BxT = next_BxT.astype(jnp.int32)
        loss_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, next_BxT)
        # A product, so that the gradient is NaN too.
        return (loss_BxT * jnp.where((next_BxT >= 0) & (next_BxT < V), 1, jnp.nan)).mean()


def from_config(config: Mapping[str, Any], *, dtype: str = "float32", remat: str = "none") -> GPT2:
    """The model of a `config.json` of Hugging Face's GPT-2; its weights: `name_map="gpt2"`.

    Args:
      config: what the file says.
      dtype, remat: see `setup`.
    """
    only_with(
        config,
        model_type="gpt2",
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        tie_word_embeddings=True,
        add_cross_attention=False,
    )
    required(config, "n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
    width = config["n_embd"]
    if config.get("n_inner") is not None:
        only_with(config, n_inner=4 * width)
    return GPT2(
        config["n_layer"],
        width,
        config["n_head"],
        config["vocab_size"],
        config["n_positions"],
        named("dtype", dtype, DTYPES),
        named("remat", remat, REMAT),
    )


def setup(
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    positions: int = 1024,
    sequence: int | None = None,
    dtype: str = "float32",
    remat: str = "none",
    precision: str | None = None,
    optimizer: str = "adamw",
    learning_rate: float = 6e-4,
    seed: int = 0,
) -> gshard.TrainSetup:
    """GPT-2 of any size; the defaults are the smallest, 124M.

    Args:
      layers, width, heads, vocabulary, positions: see `GPT2`.
      sequence: tokens of one example; by default one for each position.
      dtype: `"bfloat16"` or `"float32"`, what is computed in.
      remat: what is kept of a layer for the backward pass: `"none"` computes nothing again,
        `"dots"` keeps the products with weights, `"full"` keeps a layer's input alone.
      precision, optimizer, learning_rate, seed: see `setup_of`.
    """
    sequence = positions if sequence is None else sequence
    need(sequence <= positions, f"sequence={sequence} must be at most positions={positions}")
    return setup_of(
        GPT2(
            layers,
            width,
            heads,
            vocabulary,
            positions,
            named("dtype", dtype, DTYPES),
            named("remat", remat, REMAT),
        ),
        sequence,
        optimizer=optimizer,
        learning_rate=learning_rate,
        precision=precision,
        seed=seed,
    )
