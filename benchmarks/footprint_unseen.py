"""Models with which no rule of the memory estimate was ever changed: its accuracy is measured here.

They are written as the libraries and papers that they come from write them, at sizes at which a
compilation takes seconds. If one is off, it stays off, unless a rule that has nothing to do with
it is found: docs/development/planner-accuracy.md says how far.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.footprint_held_out import batch_of
from benchmarks.footprint_models import Case
from benchmarks.footprint_unseen_more import (
    bottleneck,
    cross_entropy,
    dit,
    graph,
    linen_params,
    text_of,
    towers,
    unet,
)


class Lm1b(nn.Module):
    """Pre-norm decoder of Flax's lm1b example, with sinusoidal positions and a tied output."""

    width: int = 256
    layers: int = 2
    words: int = 4096

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(self.words, self.width)
        mask = nn.make_causal_mask(x)
        x = embed(jnp.pad(x, ((0, 0), (1, 0)))[:, :-1])
        angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(self.width // 2) / 128)
        x += jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(self.width)(nn.relu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x)) / self.width**0.5


def lm1b(examples: int = 8) -> Case:
    model = Lm1b()

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["text"])
        weights = jnp.where(batch["text"] > 0, 1.0, 0.0)
        smooth = optax.smooth_labels(jax.nn.one_hot(batch["text"], 4096), 0.1)
        return (optax.softmax_cross_entropy(logits, smooth) * weights).sum() / weights.sum()

    state = (linen_params(model, text_of(128)), optax.adamw(1e-3))
    return Case(state, loss_fn, batch_of(text=text_of(128)), examples)


class Gemma(nnx.Module):
    """Grouped-query attention with rotary positions, gated MLP, capped logits, tied output."""

    def __init__(self, rngs: nnx.Rngs, width: int = 256, layers: int = 2, words: int = 4096):
        def dense(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs(), shape))

        self.words = dense(words, width)
        self.layers = nnx.List(
            [
                nnx.Dict(
                    q=dense(4, width, 64), kv=dense(2, 2, width, 64), o=dense(4, 64, width),
                    gate=dense(2, width, 1024), down=dense(1024, width),
                    norm1=nnx.RMSNorm(width, rngs=rngs), norm2=nnx.RMSNorm(width, rngs=rngs),
                )
                for _ in range(layers)
            ]
        )  # fmt: skip
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, text):
        table = self.words[...]
        x = table[text] * table.shape[1] ** 0.5
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        for w in self.layers:
            h = w.norm1(x)
            q = _rotated(jnp.einsum("BTD,NDH->BTNH", h, w.q[...])) * 64**-0.5
            k, v = jnp.einsum("BSD,CKDH->CBSKH", h, w.kv[...])
            q = q.reshape(*q.shape[:2], 2, 2, 64)
            scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, _rotated(k))
            scores = jnp.where(mask[:, None, None, :], scores, -2.3e38)
            found = jnp.einsum("BTKGS,BSKH->BTKGH", jax.nn.softmax(scores), v)
            x = x + jnp.einsum("BTNH,NHD->BTD", found.reshape(*found.shape[:2], 4, 64), w.o[...])
            gate, up = jnp.einsum("BTD,GDF->GBTF", w.norm2(x), w.gate[...])
            x = x + jax.nn.gelu(gate) * up @ w.down[...]
        return 30 * jnp.tanh(self.norm(x) @ table.T / 30)


def _rotated(x_BxTxNxH):
    angles = jnp.arange(x_BxTxNxH.shape[1])[:, None] / 1e4 ** (jnp.arange(32) / 32)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x_BxTxNxH, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gemma(examples: int = 8) -> Case:
    def make():
        model = Gemma(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def loss_fn(model, batch):
        logits, target = model(batch["text"])[:, :-1], batch["text"][:, 1:]
        mask = (target != 0).astype(jnp.float32)
        hot = jax.nn.one_hot(target, logits.shape[-1]) * mask[..., None]
        return -(jax.nn.log_softmax(logits) * hot).sum() / (mask.sum() + 1e-8)

    return Case(nnx.eval_shape(make), loss_fn, batch_of(text=text_of(128)), examples)


class _NanodoBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(dtype=jnp.bfloat16, use_bias=False)(x)
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=jnp.bfloat16)
        q, k, v = (dense((4, self.width // 4), name=name)(h) for name in "qkv")
        scores = jnp.einsum("BQHD,BKHD->BHQK", q / (self.width / 4) ** 0.5, k)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores.astype(jnp.float32), -1e30)
        mixed = jnp.einsum("BHQK,BKHD->BQHD", jax.nn.softmax(scores).astype(jnp.bfloat16), v)
        x += dense(self.width, axis=(-2, -1), name="o")(mixed)
        h = nn.LayerNorm(dtype=jnp.bfloat16, use_bias=False)(x)
        return x + dense(self.width)(jax.nn.gelu(dense(4 * self.width)(h)))


class Nanodo(nn.Module):
    """nanodo's decoder: rematerialized blocks that compute in bfloat16, logits in float32."""

    width: int = 256
    layers: int = 2
    words: int = 4096

    @nn.compact
    def __call__(self, y):
        embed = nn.Embed(self.words, self.width)
        y = embed(y) + nn.Embed(128, self.width)(jnp.arange(y.shape[1])[None])
        for _ in range(self.layers):
            y = nn.remat(_NanodoBlock, prevent_cse=True)(self.width)(y)
        return embed.attend(nn.LayerNorm(use_bias=False)(y).astype(jnp.float32))


def nanodo(examples: int = 16) -> Case:
    model = Nanodo()

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["text"])[:, :-1]
        target = batch["text"][:, 1:]
        weights = jnp.where(target > 0, 1.0, 0.0)
        return (cross_entropy(logits, target) * weights).sum() / weights.sum()

    state = (linen_params(model, text_of(128)), optax.adamw(1e-3))
    return Case(state, loss_fn, batch_of(text=text_of(128)), examples)


class Seq2Seq(nn.Module):
    """An LSTM that reads and one that writes (Flax's seq2seq example)."""

    width: int = 256

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(1024, self.width)
        read = nn.RNN(nn.LSTMCell(self.width), return_carry=True)
        carry, _ = read(embed(source))
        write = nn.RNN(nn.LSTMCell(self.width))
        return nn.Dense(1024)(write(embed(target), initial_carry=carry))


def seq2seq(examples: int = 32) -> Case:
    model = Seq2Seq()

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        return cross_entropy(logits, batch["target"][:, 1:]).mean()

    state = (linen_params(model, text_of(32), text_of(32)), optax.adam(1e-3))
    return Case(state, loss_fn, batch_of(source=text_of(32), target=text_of(33)), examples)


def state_space(examples: int = 4, layers: int = 3, width: int = 256, length: int = 256) -> Case:
    """Diagonal recurrences by an associative scan, rematerialized; the loss in chunks."""

    def params() -> Any:
        one = {"in": jnp.zeros((width, 2 * width)), "out": jnp.zeros((width, width))}
        one |= {"decay": jnp.zeros((width, width)), "norm": jnp.ones(width)}
        return {"words": jnp.zeros((2048, width)), "layers": [one] * layers}

    @jax.checkpoint
    def layer(x, w):
        h = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w["norm"]
        value, gate = jnp.split(h @ w["in"], 2, -1)
        decay = jax.nn.sigmoid(h @ w["decay"])

        def combine(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, state = jax.lax.associative_scan(combine, (decay, (1 - decay) * value), axis=1)
        return x + (state * jax.nn.silu(gate)) @ w["out"]

    def loss_fn(params, text):
        x = params["words"][text[:, :-1]]
        for w in params["layers"]:
            x = layer(x, w)

        @jax.checkpoint
        def chunk(total, part):
            x, target = part
            return total + cross_entropy(x @ params["words"].T, target).sum(), None

        def chunks(y):
            return y.reshape(y.shape[0], 4, length // 4, *y.shape[2:]).swapaxes(0, 1)

        total, _ = jax.lax.scan(chunk, 0.0, (chunks(x), chunks(text[:, 1:])))
        return total / text[:, 1:].size

    batch = lambda n: jax.ShapeDtypeStruct((n, length + 1), jnp.int32)  # noqa: E731
    return Case((jax.eval_shape(params), optax.adamw(1e-3)), loss_fn, batch, examples)


def switch(examples: int = 8, layers: int = 2, width: int = 256, experts: int = 4) -> Case:
    """Each token to one expert of limited capacity, scanned layers (Fedus et al., 2021)."""
    length = 128
    capacity = length // experts * 2

    def params() -> Any:
        def stack(*shape: int) -> jax.Array:
            return jnp.zeros((layers, *shape))

        made = {"mix": stack(length, length), "route": stack(width, experts)}
        made |= {"up": stack(experts, width, 512), "down": stack(experts, 512, width)}
        return {"words": jnp.zeros((2048, width)), "layers": made}

    def layer(x, w):
        x = x + jnp.einsum("TS,BSD->BTD", w["mix"], jax.nn.standardize(x))
        gates = jax.nn.softmax(x @ w["route"])
        chosen = jax.nn.one_hot(gates.argmax(-1), experts)
        place = (jnp.cumsum(chosen, 1) - 1) * chosen
        slot = jax.nn.one_hot(place.sum(-1).astype(int), capacity) * (place < capacity).all(
            -1, keepdims=True
        )
        dispatch = jnp.einsum("BTE,BTC->BTEC", chosen, slot)
        inside = jnp.einsum("BTEC,BTD->EBCD", dispatch, x)
        h = jax.nn.relu(jnp.einsum("EBCD,EDF->EBCF", inside, w["up"]))
        out = jnp.einsum("EBCF,EFD->EBCD", h, w["down"])
        weighted = dispatch * gates.max(-1)[..., None, None]
        balance = experts * (chosen.mean((0, 1)) * gates.mean((0, 1))).sum()
        return x + jnp.einsum("BTEC,EBCD->BTD", weighted, out), balance

    def loss_fn(params, text):
        x, balance = jax.lax.scan(layer, params["words"][text[:, :-1]], params["layers"])
        logits = jax.nn.standardize(x) @ params["words"].T
        return cross_entropy(logits, text[:, 1:]).mean() + 0.01 * balance.mean()

    batch = lambda n: jax.ShapeDtypeStruct((n, length + 1), jnp.int32)  # noqa: E731
    more = {"scan_axes": {"^layers/": 0}}
    return Case((jax.eval_shape(params), optax.adafactor(1e-3)), loss_fn, batch, examples, more)


UNSEEN: dict[str, Callable[[], Case]] = {
    "lm1b": lm1b,
    "gemma": gemma,
    "nanodo": nanodo,
    "graph": graph,
    "unet": unet,
    "seq2seq": seq2seq,
    "state-space": state_space,
    "dit": dit,
    "switch": switch,
    "bottleneck": bottleneck,
    "towers": towers,
}
