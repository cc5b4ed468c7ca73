"""Random losses out of `jax.numpy`, `jax.random`, optax losses and Flax layers.

A loss is a list of steps over a pool of values. Each step takes two of them and adds its result, so
that every list is a loss, and hypothesis can shrink it. Entries stay of the order of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

SIZES = [(6, 4, 3), (6, 6, 6), (6, 2, 6), (12, 3, 2), (6, 12, 1)]  # examples, time, features
LARGEST = 3000  # entries of a value
F32 = jnp.float32


class Step(NamedTuple):
    """One step: its operation, the values that it takes, counted from the last, and an option."""

    name: str
    x: int
    y: int
    n: int


class Program(NamedTuple):
    """A random loss."""

    sizes: tuple[int, int, int]
    steps: tuple[Step, ...]
    final: str


@dataclass
class Known:
    """What the operations may use beside their operands."""

    params: dict[str, jax.Array]
    batch: dict[str, jax.Array]
    key: jax.Array
    n: int

    def axis(self, x: Any) -> int:
        return self.n % x.ndim

    def weights(self, x: Any, out: int = 4) -> jax.Array:
        """A matrix of parameters for the last dimension of `x`."""
        return self.params["w"][: x.shape[-1], :out].astype(x.dtype)

    def like(self, x: Any, y: Any) -> jax.Array:
        """`y` in a shape that `x` broadcasts with: as it is, per example, or its mean."""
        try:
            if jnp.broadcast_shapes(x.shape, y.shape) == x.shape:
                return y
        except ValueError:
            pass
        if x.ndim and y.ndim and y.shape[0] == x.shape[0]:
            return y.reshape(y.shape[0], -1).mean(1).reshape(-1, *[1] * (x.ndim - 1))
        return y.mean()


Operation = Callable[[Known, Any, Any], Any]
OPERATIONS: dict[str, Operation] = {}


def operation(f: Operation) -> Operation:
    OPERATIONS[f.__name__.strip("_")] = f
    return f


def operations(**more: Operation) -> None:
    OPERATIONS.update(more)


def wide(x: Any, size: int = 16) -> Any:
    """At least one dimension; the last of at most `size`."""
    x = x if x.ndim else x[None]
    return x[..., :size]


def merged(x: Any, at: int) -> Any:
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def divided(x: Any, at: int, into: int) -> Any:
    size = x.shape[at]
    if size % into:
        return x
    return x.reshape(*x.shape[:at], into, size // into, *x.shape[at + 1 :])


operations(
    tanh=lambda k, x, y: jnp.tanh(x * 2),
    relu=lambda k, x, y: jax.nn.relu(x - 0.1),
    silu=lambda k, x, y: jax.nn.silu(x),
    gelu=lambda k, x, y: jax.nn.gelu(x),
    softplus=lambda k, x, y: jax.nn.softplus(x),
    elu=lambda k, x, y: jax.nn.elu(x),
    sqrt=lambda k, x, y: jnp.sqrt(jnp.square(x) + 0.3),
    exp=lambda k, x, y: jnp.exp(-jnp.square(x)),
    log1p=lambda k, x, y: jnp.log1p(jnp.square(x)),
    clip=lambda k, x, y: jnp.clip(x, -0.8, 0.9),
    erf=lambda k, x, y: jax.scipy.special.erf(x),
    narrow=lambda k, x, y: x.astype(jnp.bfloat16).astype(x.dtype),
    add=lambda k, x, y: x + k.like(x, y),
    subtract=lambda k, x, y: x - 0.5 * k.like(x, y),
    mul=lambda k, x, y: x * k.like(x, y),
    divide=lambda k, x, y: x / (1 + jnp.square(k.like(x, y))),
    maximum=lambda k, x, y: jnp.maximum(x, k.like(x, y)),
    where=lambda k, x, y: jnp.where(k.like(x, y) > 0.05, x, 0.3 - x),
    matmul=lambda k, x, y: jnp.tanh(wide(x) @ k.weights(wide(x))),
    dense=lambda k, x, y: nn.Dense(5).apply(
        {"params": {"kernel": k.params["w"][: wide(x).shape[-1], :5], "bias": k.params["b"][:5]}},
        wide(x),
    ),
    reshape=lambda k, x, y: x.reshape(-1),
    merge=lambda k, x, y: merged(x, k.n % (x.ndim - 1)) if x.ndim > 1 else x,
    split=lambda k, x, y: divided(x, k.axis(x), (2, 3)[k.n % 2]) if 0 < x.ndim < 4 else x,
    transpose=lambda k, x, y: x.T if k.n % 2 else jnp.moveaxis(x, 0, -1) if x.ndim else x,
    time_major=lambda k, x, y: merged(jnp.swapaxes(x, 0, 1), 0) if x.ndim > 1 else x,
    expand=lambda k, x, y: jnp.broadcast_to(x[..., None], (*x.shape, 2)) if x.ndim < 4 else x,
    half=lambda k, x, y: x[: max(1, len(x) // 2)] if x.ndim else x,
    strided=lambda k, x, y: x[k.n % 2 :: 2] if x.ndim and len(x) > 1 else x,
    differences=lambda k, x, y: jnp.diff(x, axis=k.axis(x)) if x.ndim and x.size > 30 else x,
    first=lambda k, x, y: x[k.n % len(x)] if x.ndim else x,
    concatenate=lambda k, x, y: jnp.concatenate([x, 1 - x], k.axis(x)) if x.ndim else x,
    stack=lambda k, x, y: jnp.stack([x, 0.5 * k.like(x, y) + 0 * x], k.n % (x.ndim + 1)),
    parts=lambda k, x, y: (
        jnp.multiply(*jnp.split(x, 2, k.axis(x))) if x.ndim and x.shape[k.axis(x)] % 2 == 0 else x
    ),
    roll=lambda k, x, y: x - 0.5 * jnp.roll(x, 1, k.axis(x)) if x.ndim else x,
    flip=lambda k, x, y: x + 0.5 * jnp.flip(x, k.axis(x)) if x.ndim else x,
    pad=lambda k, x, y: jnp.pad(x, [(1, 0)] + [(0, 0)] * (x.ndim - 1)) if x.ndim else x,
    pad_last=lambda k, x, y: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) if x.ndim else x,
    tile=lambda k, x, y: jnp.tile(x, 2),
    repeat=lambda k, x, y: jnp.repeat(x, 2, 0) if x.ndim else x,
    cumsum=lambda k, x, y: jnp.cumsum(x, k.axis(x)) / x.shape[k.axis(x)] if x.ndim else x,
    cummax=lambda k, x, y: lax.cummax(x, k.axis(x)) if x.ndim else x,
    sort=lambda k, x, y: jnp.sort(x, k.axis(x)) if x.ndim else x,
    top_k=lambda k, x, y: lax.top_k(x, min(2, x.shape[-1]))[0] if x.ndim else x,
    ranks=lambda k, x, y: jnp.argsort(x, k.axis(x)) / 5.0 if x.ndim else x,
    arange=lambda k, x, y: (
        x * jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) / len(x) if x.ndim else x
    ),
    softmax=lambda k, x, y: jax.nn.softmax(3 * x, k.axis(x)) if x.ndim else x,
    log_softmax=lambda k, x, y: jax.nn.log_softmax(x, k.axis(x)) if x.ndim else x,
    logsumexp=lambda k, x, y: jax.nn.logsumexp(x, k.axis(x)) if x.ndim else x,
    mean=lambda k, x, y: x.mean(k.axis(x), keepdims=k.n % 2 == 0) if x.ndim else x,
    sum=lambda k, x, y: x.sum(k.axis(x)) / 3 if x.ndim else x,
    centre=lambda k, x, y: x - x.mean(k.axis(x), keepdims=True) if x.ndim else x,
    where_mean=lambda k, x, y: (
        jnp.mean(x, 0, where=(jnp.cos(jnp.arange(len(x))) > -0.5).reshape(-1, *[1] * (x.ndim - 1)))
        if x.ndim
        else x
    ),
    normalized=lambda k, x, y: (
        (x - x.mean(k.axis(x), keepdims=True)) / jnp.sqrt(x.var(k.axis(x), keepdims=True) + 0.3)
        if x.ndim
        else x
    ),
    norm=lambda k, x, y: jnp.sqrt(jnp.square(x).sum(k.axis(x)) + 0.3) if x.ndim else x,
    largest=lambda k, x, y: x.max(k.axis(x)) if x.ndim else x,
    smallest=lambda k, x, y: x.min() + 0 * x,
    prod=lambda k, x, y: jnp.prod(jnp.cos(x), k.axis(x)) if x.ndim else x,
)


@operation
def product(k: Known, x: Any, y: Any) -> Any:
    """Products of examples with one another, or over them."""
    x = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(-1, 1)
    y = y.reshape(len(x), -1) if y.ndim and y.size % len(x) == 0 else x
    scale = max(x.shape)
    return (x @ x.T / scale, jnp.einsum("bi,bj->ij", x, y) / scale, y.T @ x / scale)[k.n % 3]


@operation
def attention(k: Known, x: Any, y: Any) -> Any:
    x = x.reshape(len(x), -1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1, 1)
    scores = jnp.einsum("bqd,bkd->bqk", x, jnp.tanh(x))
    if k.n % 2:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)


@operation
def convolution(k: Known, x: Any, y: Any) -> Any:
    x = x.reshape(len(x), -1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1, 1)
    kernel = k.params["w"][: 2 * x.shape[-1], :4].reshape(2, -1, 4)
    if kernel.shape[1] != x.shape[-1]:
        return x
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


@operation
def pool(k: Known, x: Any, y: Any) -> Any:
    if x.ndim < 3:
        return x
    return (nn.avg_pool, nn.max_pool)[k.n % 2](x, (2,) * (x.ndim - 2), padding="SAME")


@operation
def layer_norm(k: Known, x: Any, y: Any) -> Any:
    return nn.LayerNorm(use_bias=False, use_scale=False, epsilon=0.3).apply({}, wide(x))


@operation
def batch_norm(k: Known, x: Any, y: Any) -> Any:
    net = nn.BatchNorm(False, use_bias=False, use_scale=False, epsilon=0.3)
    size = wide(x).shape[-1]
    stats = {"batch_stats": {"mean": jnp.zeros(size), "var": jnp.ones(size)}}
    return net.apply(stats, wide(x), mutable="batch_stats")[0]


@operation
def dropout(k: Known, x: Any, y: Any) -> Any:
    shared = (0,) if k.n % 3 == 0 and x.ndim else ()
    layer = nn.Dropout(0.4, broadcast_dims=shared, deterministic=False)
    return layer.apply({}, x, rngs={"dropout": k.key})


# Integers and indices


def labels(k: Known, x: Any, classes: int) -> Any:
    """Integers per entry of the leading dimension."""
    y = k.batch["y"]
    y = y if len(y) == len(x) else jnp.arange(len(x)) * 7
    return y % classes


@operation
def cross_entropy(k: Known, x: Any, y: Any) -> Any:
    x = wide(x)
    flat = x.reshape(-1, x.shape[-1])
    return optax.softmax_cross_entropy_with_integer_labels(flat, labels(k, flat, x.shape[-1]))


@operation
def optax_loss(k: Known, x: Any, y: Any) -> Any:
    y = k.like(x, y) + 0 * x
    known = [
        partial(optax.huber_loss, delta=0.4),
        optax.l2_loss,
        optax.log_cosh,
        lambda x, y: optax.sigmoid_binary_cross_entropy(x, jax.nn.sigmoid(y)),
        lambda x, y: optax.sigmoid_focal_loss(x, jax.nn.sigmoid(y)),
        lambda x, y: optax.cosine_distance(x + 0.1, y + 0.2, epsilon=0.1) if x.ndim else x,
        lambda x, y: optax.kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(y)) if x.ndim else x,
    ]
    return known[k.n % len(known)](x, y)


@operation
def embed(k: Known, x: Any, y: Any) -> Any:
    tokens = k.batch["tokens"]
    table = x.reshape(-1, x.shape[-1])[:, :8] if k.n % 3 == 0 and x.ndim else k.params["w"]
    return table[tokens % len(table)] if k.n % 2 else jnp.take(table, tokens % len(table), axis=0)


@operation
def pick(k: Known, x: Any, y: Any) -> Any:
    """One entry of each example."""
    if x.ndim < 2:
        return x
    at = labels(k, x, x.shape[1])
    ways = [
        lambda: x[jnp.arange(len(x)), at],
        lambda: jnp.take_along_axis(x, at.reshape(-1, *[1] * (x.ndim - 1)), 1),
        lambda: jnp.einsum("bc...,bc->b...", x, jax.nn.one_hot(at, x.shape[1], dtype=x.dtype)),
        lambda: jax.vmap(lambda row, i: row[i])(x, at),
        lambda: x[jnp.arange(len(x))[::-1], at],
        lambda: jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, 1))(x, at),
    ]
    return ways[k.n % len(ways)]()


@operation
def permuted(k: Known, x: Any, y: Any) -> Any:
    if not x.ndim:
        return x
    order = jax.random.permutation(k.key, len(x))
    return (x[order], x[jnp.argsort(labels(k, x, 50))], x[labels(k, x, len(x))])[k.n % 3] + 0.5 * x


@operation
def scatter(k: Known, x: Any, y: Any) -> Any:
    if not x.ndim:
        return x
    at, rows = labels(k, x, 5), jnp.arange(len(x))
    ways = [
        lambda: jax.ops.segment_sum(x, at, 5) / 3,
        lambda: jnp.zeros((5, *x.shape[1:]), x.dtype).at[at].max(x),
        lambda: jnp.ones((5, *x.shape[1:]), x.dtype).at[at].add(x),
        lambda: x.at[0].set(1.5),
        lambda: x.at[..., 0].multiply(0.5),
        lambda: x.at[rows].add(0.5 * x),
        lambda: jnp.zeros((len(x), 5), x.dtype).at[rows, at].set(x.reshape(len(x), -1)[:, 0]),
        lambda: jax.vmap(lambda i, r: jnp.zeros(5, x.dtype).at[i].add(r.mean()))(at, x),
        lambda: jax.ops.segment_sum(x, at, 5)[at] / 3,
        lambda: jax.ops.segment_max(x, at, 5)[at],
    ]
    return ways[k.n % len(ways)]()


@operation
def integers(k: Known, x: Any, y: Any) -> Any:
    t = k.batch["tokens"]
    shape = (len(t), *[1] * (x.ndim - 1)) if x.ndim and len(x) == len(t) else ()
    ways = [
        lambda: (t * 3 + 1) % 7,
        lambda: jnp.bincount(t.reshape(-1) % 4, length=4),
        lambda: (t.astype(jnp.uint32) - jnp.uint32(2)).sum(1) % 5,
        lambda: (jnp.uint32(100) - t.astype(jnp.uint32).sum()).reshape(1),
        lambda: (t.astype(jnp.uint8) * jnp.uint8(40)).sum(dtype=jnp.uint8).reshape(1) % 11,
        lambda: jnp.bitwise_xor(t, t >> 1),
        lambda: jnp.cumsum(t, 0) % 6,
        lambda: (t > 3).sum() * jnp.arange(3) % 4,
        lambda: jnp.argmax(t, 0) + jnp.argmin(t.sum(1)),
        lambda: lax.population_count(t) + (t.max() - t.min()),
        lambda: jnp.searchsorted(jnp.sort(t.reshape(-1)), t),
        lambda: jnp.any(t > 6, 0) + jnp.all(t < 7, 0),
        lambda: (t * 500_000_003).sum(0).astype(F32) * 2**-29,  # beyond 32 bits
        lambda: (t > 3).sum(0).astype(F32) / len(t),
    ]
    found = ways[k.n % len(ways)]().astype(x.dtype) / 7
    found = found.reshape(found.shape[0], -1).mean(1) if shape else found.mean()
    return x + (found.reshape(shape) if shape and found.size == len(t) else found.mean())
