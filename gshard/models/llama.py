"""Llama in Flax Linen, at any size, written to need little memory.

Attention and the cross-entropy go over slices of the sequence. Nothing of the model knows about
gshard; with `batch_sharding`, activations are constrained to be sharded by examples, for GSPMD.

Letters in names: B sequences, T tokens of each, D width, H heads, K heads of keys and values, E
features of a head, P pairs of them, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import gshard
from gshard.models.by_slices import attend, cross_entropy, slice_of
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


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Rotary positions for longer sequences (Llama 3.1; `rope_type: llama3` of Hugging Face).

    Attributes:
      factor: what the wavelengths of slow pairs are multiplied by.
      low, high: pairs that turn fewer times than `low` in `tokens` tokens are slow, those that turn
        more often than `high` are kept, and those between are blended.
      tokens: the longest sequence before.
    """

    factor: float
    low: float
    high: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model; the defaults are those of Llama 2 7B (Touvron et al., 2023, section 2.2).

    Attributes:
      layers: how many.
      width: of the stream.
      heads: of queries, which share the width.
      kv_heads: of keys and values; each serves `heads / kv_heads` heads of queries.
      mlp: width of the gated MLP.
      vocabulary: tokens.
      tied: the head is the embedding, transposed.
      theta: base of the rotary positions.
      epsilon: what the norms add to the mean square.
      stretch: of long waves of the rotary positions, as Llama 3.1 has it.
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 32
    mlp: int = 11008
    vocabulary: int = 32000
    tied: bool = False
    theta: float = 10000.0
    epsilon: float = 1e-5
    stretch: Stretch | None = None

    def __post_init__(self) -> None:
        counts = self.layers, self.width, self.heads, self.kv_heads, self.mlp, self.vocabulary
        need(min(counts) > 0, f"{self}: each must be at least 1")
        pairs = f"2 x heads = 2 x {self.heads} = {2 * self.heads}"
        fits = self.width % (2 * self.heads) == 0
        need(fits, f"width={self.width} must be a multiple of {pairs}")
        fits = self.heads % self.kv_heads == 0
        need(fits, f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")


def hold(x: jax.Array, batch_sharding: NamedSharding | None) -> jax.Array:
    """Constrains an array to be sharded by examples, if a sharding is given."""
    return x if batch_sharding is None else jax.lax.with_sharding_constraint(x, batch_sharding)


def rotate(x_BxTxHxE: jax.Array, theta: float, stretch: Stretch | None = None) -> jax.Array:
    """Rotary positions: pairs of features turned by an angle that grows with the position."""
    T, E = x_BxTxHxE.shape[1], x_BxTxHxE.shape[-1]
    speed_P = theta ** -(jnp.arange(E // 2) / (E // 2))
    if stretch is not None:
        turns_P = stretch.tokens * speed_P / (2 * jnp.pi)
        kept_P = jnp.clip((turns_P - stretch.low) / (stretch.high - stretch.low), 0, 1)
        speed_P *= kept_P + (1 - kept_P) / stretch.factor
    angle_Tx1xP = jnp.arange(T)[:, None, None] * speed_P
    cos, sin = jnp.cos(angle_Tx1xP), jnp.sin(angle_Tx1xP)
    a, b = jnp.split(x_BxTxHxE.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x_BxTxHxE.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions; several heads of queries share keys and values."""

    sizes: Sizes
    dtype: Any
    attention: str = "slices"

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> Any:
        B, T, D = x_BxTxD.shape
        H, K = self.sizes.heads, self.sizes.kv_heads
        rope = self.sizes.theta, self.sizes.stretch

        def heads(n: int, name: str):
            y_BxTxnE = nn.Dense(n * D // H, use_bias=False, dtype=self.dtype, name=name)(x_BxTxD)
            return y_BxTxnE.reshape(B, T, n, D // H)

        q_BxTxHxE, k_BxTxKxE, v_BxTxKxE = heads(H, "q"), heads(K, "k"), heads(K, "v")
        q_BxTxHxE, k_BxTxKxE = rotate(q_BxTxHxE, *rope), rotate(k_BxTxKxE, *rope)
        if self.attention == "slices":
            y_BxTxHxE = attend(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, slice_of(T))
        else:
            how = {"causal": True, "by": self.attention}
            y_BxTxHxE = gshard.sequence.attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, **how)
        y_BxTxD = y_BxTxHxE.reshape(B, T, D)
        return nn.Dense(D, use_bias=False, dtype=self.dtype, name="o")(y_BxTxD)


class MLP(nn.Module):
    """Two layers, the first gated."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> Any:
        def dense(features: int, name: str):
            return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)

        F = self.sizes.mlp
        h_BxTxF = nn.silu(dense(F, "gate")(x_BxTxD)) * dense(F, "up")(x_BxTxD)
        return dense(x_BxTxD.shape[-1], "down")(h_BxTxF)


class Block(nn.Module):
    """Attention, then a gated MLP; each sees a normalized copy of the stream."""

    sizes: Sizes
    dtype: Any
    attention: str
    batch_sharding: NamedSharding | None

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: Any) -> Any:
        epsilon = self.sizes.epsilon
        h_BxTxD = nn.RMSNorm(epsilon, dtype=self.dtype, name="attention_norm")(x_BxTxD)
        attention = Attention(self.sizes, self.dtype, self.attention, name="attention")
        y_BxTxD = attention(h_BxTxD)
        x_BxTxD = hold(x_BxTxD + y_BxTxD, self.batch_sharding)
        h_BxTxD = nn.RMSNorm(epsilon, dtype=self.dtype, name="mlp_norm")(x_BxTxD)
        y_BxTxD = MLP(self.sizes, self.dtype, name="mlp")(h_BxTxD)
        return hold(x_BxTxD + y_BxTxD, self.batch_sharding), None


class Llama(nn.Module):
    """The mean cross-entropy of every token given the ones before it, in nats; or its logits.

    Without the next tokens it returns the logits, (B, T, V) in float32. All next tokens count; one
    that is not from 0 to V - 1, such as -100, makes the loss and its gradient NaN.

    Attributes:
      sizes: of the model.
      dtype: what is computed in; parameters are cast to it where they are used.
      remat: what the backward pass finds of a layer, a value of `REMAT`.
      attention: `"slices"` of queries at a time, or how `gshard.sequence.attention` shares a
        sequence: `"ring"`, `"ulysses"` or `"gather"`.
      batch_sharding: of activations (examples, ...), for a compiler that chooses layouts; None if
        each device sees only its own examples.
    """

    sizes: Sizes = Sizes()
    dtype: Any = jnp.bfloat16
    remat: Any = REMAT["full"]
    attention: str = "slices"
    batch_sharding: NamedSharding | None = None

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, next_BxT: jax.Array | None = None) -> jax.Array:
        D, V, T = self.sizes.width, self.sizes.vocabulary, tokens_BxT.shape[1]
        embed = nn.Embed(V, D, dtype=self.dtype, name="embed")
        # In bytes, XLA:CPU without fusion emitters reads another entry beyond 256 (jaxlib 0.10.2).
        x_BxTxD = hold(embed(tokens_BxT.astype(jnp.int32)), self.batch_sharding)
        layers = stack_of(Block, self.sizes.layers, self.remat)
        layer = self.sizes, self.dtype, self.attention, self.batch_sharding
        x_BxTxD, _ = layers(*layer, name=STACK)(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(self.sizes.epsilon, dtype=self.dtype, name="norm")(x_BxTxD)

        if self.sizes.tied:
            head_DxV = embed.embedding.astype(self.dtype).T
        else:
            head_DxV = self.param("head", nn.initializers.lecun_normal(), (D, V), jnp.float32)
            head_DxV = head_DxV.astype(self.dtype)
        if self.batch_sharding is not None:  # once, and not again for every slice
            head_DxV = hold(head_DxV, NamedSharding(self.batch_sharding.mesh, jax.P()))
        if next_BxT is None:
            return jnp.matmul(x_BxTxD, head_DxV, preferred_element_type=jnp.float32)
        return cross_entropy(x_BxTxD, head_DxV, next_BxT, slice_of(T)).mean() / T


def from_config(
    config: Mapping[str, Any], *, dtype: str = "bfloat16", remat: str = "full"
) -> Llama:
    """The model of a `config.json` of Hugging Face's Llama; its weights: `name_map="llama"`.

    Args:
      config: what the file says.
      dtype, remat: see `setup`.
    """
    only_with(
        config,
        model_type="llama",
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
    )
    needed = ("num_hidden_layers", "intermediate_size", "vocab_size")
    required(config, "hidden_size", "num_attention_heads", *needed)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("head_dim") is not None:
        only_with(config, head_dim=width // heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stretch = None
    kind = rope.get("rope_type") or rope.get("type") or "default"  # `type` in older files
    if kind != "default":
        only_with({"rope_type": kind}, rope_type="llama3")
        freq = ("low_freq_factor", "high_freq_factor")
        names = ("factor", *freq, "original_max_position_embeddings")
        required(rope, *names)
        stretch = Stretch(*(rope[name] for name in names))
    sizes = Sizes(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        epsilon=config.get("rms_norm_eps", 1e-6),
        stretch=stretch,
    )
    return Llama(sizes, named("dtype", dtype, DTYPES), named("remat", remat, REMAT))


def setup(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    mlp: int = 11008,
    vocabulary: int = 32000,
    tied: bool = False,
    theta: float = 10000.0,
    sequence: int = 4096,
    dtype: str = "bfloat16",
    remat: str = "full",
    attention: str = "slices",
    precision: str | None = None,
    optimizer: str = "adamw",
    learning_rate: float = 3e-4,
    seed: int = 0,
) -> gshard.TrainSetup:
    """Llama of any size; the defaults are Llama 2 7B.

    Args:
      layers, width, heads, kv_heads, mlp, vocabulary, tied, theta: see `Sizes`.
      sequence: tokens of one example.
      dtype: `"bfloat16"` or `"float32"`, what is computed in.
      remat: what is kept of a layer for the backward pass: `"none"` computes nothing again,
        `"dots"` keeps the products with weights, `"full"` keeps a layer's input alone.
      attention: see `Llama`; with a sequence axis `"ring"` or `"ulysses"`.
      precision, optimizer, learning_rate, seed: see `setup_of`.
    """
    sizes = Sizes(layers, width, heads, kv_heads, mlp, vocabulary, tied, theta)
    computed = named("dtype", dtype, DTYPES), named("remat", remat, REMAT)
    known = {name: name for name in ("slices", "ring", "ulysses", "gather")}
    return setup_of(
        Llama(sizes, *computed, named("attention", attention, known)),
        sequence,
        optimizer=optimizer,
        learning_rate=learning_rate,
        precision=precision,
        seed=seed,
    )
