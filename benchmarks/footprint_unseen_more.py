"""More models of `footprint_unseen`: graphs, images and tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.footprint_held_out import batch_of
from benchmarks.footprint_models import Case

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def linen_params(model: nn.Module, *inputs: Any) -> Any:
    """Abstract parameters of a Linen model."""
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]


def text_of(length: int) -> jax.Array:
    """One text of so many tokens."""
    return jnp.zeros((1, length), jnp.int32)


class Graph(nn.Module):
    """Messages along edges, summed at nodes (jraph's segment_sum)."""

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        def mlp(x):
            return nn.Dense(128)(nn.relu(nn.Dense(256)(x)))

        x = nn.Dense(128)(nodes)
        for _ in range(3):
            messages = mlp(jnp.concatenate([x[senders], x[receivers]], -1))
            total = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            x += mlp(jnp.concatenate([x, nn.LayerNorm()(total)], -1))
        return nn.Dense(10)(x)


def graph(examples: int = 16) -> Case:
    model = Graph()
    one: dict[str, Any] = {"nodes": jnp.zeros((1, 64, 16)), "label": text_of(64)}
    one |= {"senders": text_of(256), "receivers": text_of(256)}
    params = linen_params(model, jnp.zeros((64, 16)), jnp.zeros(256, int), jnp.zeros(256, int))

    def loss_fn(params, batch):
        run = jax.vmap(lambda *x: model.apply({"params": params}, *x))
        logits: Any = run(batch["nodes"], batch["senders"], batch["receivers"])
        return cross_entropy(logits, batch["label"]).mean()

    return Case((params, optax.adam(1e-3)), loss_fn, batch_of(**one), examples)


class UNet(nn.Module):
    """Denoising: residual blocks with GroupNorm, down and up again with skips (Ho et al., 2020)."""

    width: int = 32

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(32) / 4)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.Dense(128)(nn.swish(nn.Dense(128)(time)))

        def block(x, width):
            h = nn.Conv(width, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
            h += nn.Dense(width)(nn.swish(time))[:, None, None]
            h = nn.Conv(width, (3, 3))(nn.swish(nn.GroupNorm(8)(h)))
            return h + (nn.Dense(width)(x) if x.shape[-1] != width else x)

        x = nn.Conv(self.width, (3, 3))(x)
        skips = []
        for scale in (1, 2, 4):
            x = block(x, scale * self.width)
            skips.append(x)
            x = nn.Conv(scale * self.width, (3, 3), (2, 2))(x)
        x = block(x, 4 * self.width)
        for scale in (4, 2, 1):
            batch, height, wide, features = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * wide, features), "nearest")
            x = block(jnp.concatenate([x, skips.pop()], -1), scale * self.width)
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))


def unet(examples: int = 8) -> Case:
    model = UNet()
    image, time = jnp.zeros((1, 32, 32, 3)), jnp.zeros(1)

    def loss_fn(params, batch):
        share = jnp.cos(batch["time"])[:, None, None, None]
        noisy = share * batch["image"] + jnp.sqrt(1 - share**2) * batch["noise"]
        found: Any = model.apply({"params": params}, noisy, batch["time"])
        return jnp.square(found - batch["noise"]).mean()

    state = (linen_params(model, image, time), optax.adam(1e-3))
    return Case(state, loss_fn, batch_of(image=image, noise=image, time=time), examples)


class _DitBlock(nn.Module):
    @nn.compact
    def __call__(self, x, condition):
        width = x.shape[-1]
        shift = jnp.split(nn.Dense(6 * width)(nn.silu(condition))[:, None], 6, -1)
        norm = partial(nn.LayerNorm, use_bias=False, use_scale=False)
        h = norm()(x) * (1 + shift[1]) + shift[0]
        x = x + shift[2] * nn.MultiHeadDotProductAttention(4)(h)
        h = norm()(x) * (1 + shift[4]) + shift[3]
        return x + shift[5] * nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h))), None


class Dit(nn.Module):
    """A scan of blocks with adaptive norms, of which products are kept (Peebles and Xie, 2023)."""

    @nn.compact
    def __call__(self, x, time):
        x = nn.Dense(256)(x) + self.param("places", nn.initializers.normal(), (1, 64, 256))
        condition = nn.Dense(256)(jnp.sin(time[:, None] * jnp.arange(64)))
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = nn.remat(_DitBlock, prevent_cse=False, policy=policy)
        axes: dict[str, Any] = {"params": 0}
        scan = nn.scan(block, axes, split_rngs={"params": True}, in_axes=nn.broadcast, length=4)
        x, _ = scan(name="layers")(x, condition)
        return nn.Dense(16)(nn.LayerNorm()(x))


def dit(examples: int = 16) -> Case:
    model = Dit()
    x, time = jnp.zeros((1, 64, 16)), jnp.zeros(1)

    def loss_fn(params, batch):
        found: Any = model.apply({"params": params}, batch["x"] + batch["noise"], batch["time"])
        return jnp.square(found - batch["noise"]).mean()

    state = (linen_params(model, x, time), optax.adamw(1e-3))
    more = {"scan_axes": {"^layers/": 0}}
    return Case(state, loss_fn, batch_of(x=x, noise=x, time=time), examples, more)


class Bottleneck(nn.Module):
    """ResNet-50's blocks, one at each of four resolutions (Flax's imagenet example)."""

    width: int = 32

    @nn.compact
    def __call__(self, x):
        norm = partial(nn.GroupNorm, 16)
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), "SAME")
        for i in range(4):
            wide, stride = self.width << i, 1 + (i > 0)
            y = nn.relu(norm()(nn.Conv(wide, (1, 1), use_bias=False)(x)))
            y = nn.relu(norm()(nn.Conv(wide, (3, 3), (stride,) * 2, use_bias=False)(y)))
            y = norm()(nn.Conv(4 * wide, (1, 1), use_bias=False)(y))
            x = norm()(nn.Conv(4 * wide, (1, 1), (stride,) * 2, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(1000)(x.mean((1, 2)))


def bottleneck(examples: int = 16) -> Case:
    model = Bottleneck()
    image = jnp.zeros((1, 64, 64, 3))

    def loss_fn(params, batch):
        logits: Any = model.apply({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]).mean()

    state = (linen_params(model, image), optax.sgd(0.1, momentum=0.9, nesterov=True))
    batch = batch_of(image=image, label=jnp.zeros(1, int))
    return Case(state, loss_fn, batch, examples)


def towers(examples: int = 256, rows: int = 20_000, width: int = 128) -> Case:
    """Two MLPs over tables of users and items; every other item of the batch is a negative."""

    def params() -> Any:
        tower = {"rows": jnp.zeros((rows, width))}
        tower |= {"up": jnp.zeros((width, 512)), "down": jnp.zeros((512, width))}
        return {"user": tower, "item": tower}

    def embedded(w, at):
        x = jax.nn.gelu(w["rows"][at].mean(1) @ w["up"]) @ w["down"]
        return x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)

    def loss_fn(params, batch):
        user, item = (embedded(params[name], batch[name]) for name in ("user", "item"))
        return cross_entropy(20 * user @ item.T, jnp.arange(len(user))).mean()

    return Case(
        (jax.eval_shape(params), optax.adagrad(1e-2)),
        loss_fn,
        batch_of(user=text_of(8), item=text_of(8)),
        examples,
        {},
        {"loss_semantics": "per_device"},
    )
