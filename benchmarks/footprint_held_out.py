"""Models that were written after every rule of the analytic footprint, to judge it by.

`recommendation` later taught the rule of `liveness.with_own_zeros`; footprint_unseen.py has models
that taught none.
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

from benchmarks.footprint_models import Case


class VisionTransformer(nn.Module):
    """Patches of images through pre-norm layers, unrolled (Dosovitskiy et al., 2021)."""

    width: int = 192
    layers: int = 4

    @nn.compact
    def __call__(self, x_BxHxWxC):
        x = nn.Conv(self.width, (8, 8), strides=(8, 8))(x_BxHxWxC)
        x = x.reshape(x.shape[0], -1, self.width)
        x += self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(3)(nn.LayerNorm()(x))
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


def vision(examples: int = 32) -> Case:
    model = VisionTransformer()
    image = jnp.zeros((1, 64, 64, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]

    def loss_fn(params, batch):
        logits: Any = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return Case(
        (params, optax.adamw(1e-3)),
        loss_fn,
        batch_of(image=image, label=jnp.zeros(1, int)),
        examples,
    )


def _attention(w: Any, x: jax.Array, memory: jax.Array, causal: bool, heads: int = 4) -> jax.Array:
    q, k, v = (
        (y @ w[name]).reshape(*y.shape[:2], heads, -1)
        for name, y in (("q", x), ("k", memory), ("v", memory))
    )
    scores = jnp.einsum("BTHD,BSHD->BHTS", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    found = jnp.einsum("BHTS,BSHD->BTHD", jax.nn.softmax(scores), v)
    return found.reshape(x.shape) @ w["o"]


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def translation(examples: int = 16, width: int = 256, layers: int = 3, length: int = 128) -> Case:
    """An encoder and a decoder, each a scan of recomputed layers, and one table of words."""
    words, wide = 2048, 4 * width

    def params() -> Any:
        square = jnp.zeros((layers, width, width))
        attention = {name: square for name in "qkvo"}
        mlp = {"up": jnp.zeros((layers, width, wide)), "down": jnp.zeros((layers, wide, width))}
        return {
            "words": jnp.zeros((words, width)),
            "encoder": {"own": attention, "mlp": mlp},
            "decoder": {"own": attention, "other": attention, "mlp": mlp},
        }

    def layer(memory: jax.Array | None, x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = _normed(x)
        x = x + _attention(w["own"], h, h, memory is not None)
        if memory is not None:
            x = x + _attention(w["other"], _normed(x), memory, False)
        return x + jax.nn.relu(_normed(x) @ w["mlp"]["up"]) @ w["mlp"]["down"], None

    def loss_fn(params, batch):
        table = params["words"]
        memory, _ = jax.lax.scan(
            jax.checkpoint(partial(layer, None)), table[batch["source"]], params["encoder"]
        )
        x, _ = jax.lax.scan(
            jax.checkpoint(partial(layer, _normed(memory))),
            table[batch["target"]],
            params["decoder"],
        )
        logits = _normed(x) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    text = jnp.zeros((1, length), jnp.int32)
    return Case(
        (jax.eval_shape(params), optax.adafactor(1e-3)),
        loss_fn,
        batch_of(source=text, target=text, next=text),
        examples,
        {"scan_axes": {"^(encoder|decoder)/": 0}},
    )


class Recommender(nnx.Module):
    """Tables for categories, products of all pairs, and MLPs around them (Naumov et al., 2019)."""

    def __init__(self, tables: int, rngs: nnx.Rngs, width: int = 64):
        self.tables = nnx.List([nnx.Embed(4096, width, rngs=rngs) for _ in range(tables)])
        self.below = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in ((13, 512), (512, 256), (256, width))]
        )
        pairs = (tables + 1) * tables // 2
        self.above = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in ((pairs + width, 512), (512, 256), (256, 1))]
        )

    def __call__(self, numbers_BxF, categories_BxN):
        x_BxD = numbers_BxF
        for dense in self.below:
            x_BxD = nnx.relu(dense(x_BxD))
        found = [table(categories_BxN[:, i]) for i, table in enumerate(self.tables)]
        all_BxNxD = jnp.stack([x_BxD, *found], 1)
        products = jnp.einsum("BND,BMD->BNM", all_BxNxD, all_BxNxD)
        i, j = jnp.triu_indices(all_BxNxD.shape[1], 1)
        x = jnp.concatenate([x_BxD, products[:, i, j]], 1)
        for dense in self.above[:-1]:
            x = nnx.relu(dense(x))
        return self.above[-1](x)[:, 0]


def recommendation(examples: int = 1024, tables: int = 8) -> Case:
    def make():
        model = Recommender(tables, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adagrad(1e-2), wrt=nnx.Param)

    def loss_fn(model, batch):
        logits = model(batch["numbers"], batch["categories"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    batch = batch_of(
        numbers=jnp.zeros((1, 13)), categories=jnp.zeros((1, tables), int), clicked=jnp.zeros(1)
    )
    return Case(nnx.eval_shape(make), loss_fn, batch, examples)


def linear_attention(
    examples: int = 8, width: int = 256, layers: int = 4, length: int = 256
) -> Case:
    """Attention without a softmax, in chunks that carry a state (Katharopoulos et al., 2020).

    A scan over chunks within a scan over layers, of which only matrix products are kept.
    """
    heads, chunk, words = 4, 64, 1024

    def params() -> Any:
        def stack(*shape: int) -> jax.Array:
            return jnp.zeros((layers, *shape))

        made = {name: stack(width, width) for name in "qkvgo"}
        made |= {"up": stack(width, 3 * width), "down": stack(3 * width, width)}
        return {"words": jnp.zeros((words, width)), "layers": made}

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def one(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v = part
            scores = jnp.einsum("BTHD,BSHD->BHTS", q, k) * jnp.tri(chunk)
            out = jnp.einsum("BHTS,BSHE->BTHE", scores.astype(v.dtype), v)
            out = out + jnp.einsum("BTHD,BHDE->BTHE", q, state)
            return state + jnp.einsum("BSHD,BSHE->BHDE", k, v), out

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0], -1, chunk, heads, width // heads).swapaxes(0, 1)

        state = jnp.zeros((q.shape[0], heads, width // heads, width // heads), q.dtype)
        _, out = jax.lax.scan(one, state, (split(q), split(k), split(v)))
        return out.swapaxes(0, 1).reshape(q.shape)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = _normed(x)
        q, k = (jax.nn.elu(h @ w[name]) + 1 for name in "qk")
        x = x + (mixed(q, k, h @ w["v"]) * jax.nn.silu(h @ w["g"])) @ w["o"]
        return x + jax.nn.gelu(_normed(x) @ w["up"]) @ w["down"], None

    def loss_fn(params, text):
        x, _ = jax.lax.scan(layer, params["words"][text[:, :-1]], params["layers"])
        logits = (x @ params["words"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    return Case(
        (jax.eval_shape(params), optax.lion(1e-4)),
        loss_fn,
        lambda examples: jax.ShapeDtypeStruct((examples, length + 1), jnp.int32),
        examples,
        {"scan_axes": {"^layers/": 0}, "precision": "bfloat16"},
    )


def batch_of(**one: jax.Array) -> Callable[[int], Any]:
    """Abstract batches like one row."""
    return lambda examples: {
        name: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype) for name, x in one.items()
    }


HELD_OUT: dict[str, Callable[[], Case]] = {
    "vision": vision,
    "translation": translation,
    "recommendation": recommendation,
    "linear-attention": linear_attention,
}
