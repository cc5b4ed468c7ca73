"""Random draws, loops and derivatives in random losses; and the strategy that makes a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from tests.train.global_loss.random_losses import (
    F32,
    LARGEST,
    OPERATIONS,
    SIZES,
    Known,
    Program,
    Step,
    operation,
)


@operation
def draw(k: Known, x: Any, y: Any) -> Any:
    """Random numbers with the key that the loss closes over."""
    key, shape = jax.random.fold_in(k.key, k.n), x.shape
    ways = [
        lambda: jax.random.normal(key, shape, F32),
        lambda: jax.random.uniform(key, shape, F32),
        lambda: jax.random.bernoulli(key, jax.nn.sigmoid(lax.stop_gradient(x).astype(F32)), shape),
        lambda: jax.random.gumbel(key, shape, F32) / 3,
        lambda: jax.random.randint(key, shape, 0, 4) / 4,
        lambda: jax.random.gamma(key, 2.0, shape, F32) / 3,
        lambda: jax.random.gamma(key, lax.stop_gradient(1 + x * x).astype(F32)) / 3,
        lambda: jax.random.beta(key, 2.0, 3.0, shape, F32),
        lambda: jax.random.dirichlet(key, jnp.ones(3, F32), shape[:1]).mean(),
        lambda: jax.random.truncated_normal(key, -1.0, 1.0, shape, F32),
        lambda: jax.random.rademacher(key, shape) / 2,
        lambda: jax.random.exponential(key, shape, F32) / 3,
        lambda: jax.random.laplace(key, shape, F32) / 3,
        lambda: jax.random.poisson(key, 2.0, shape) / 4,
        lambda: jax.random.categorical(key, jnp.zeros((*shape, 3), F32)) / 3,
        lambda: jax.random.choice(key, 7, shape) / 7,
        lambda: jax.random.permutation(key, shape[0] if shape else 3).mean(),
        lambda: jax.random.t(key, 5.0, shape, F32) / 4,
        lambda: jax.random.bits(key, shape, jnp.uint8) / 255,
        lambda: jax.random.normal(key, shape, jnp.bfloat16),
        lambda: jax.random.normal(key, shape[::-1], F32).T,
        lambda: jax.random.uniform(key, (*shape, 2), F32)[..., 1],
        lambda: jax.random.ball(key, 3, shape=shape, dtype=F32)[..., 0],
    ]
    noise = ways[k.n % len(ways)]()
    return x + 0.5 * noise.astype(x.dtype)


@operation
def draw_by_example(k: Known, x: Any, y: Any) -> Any:
    """A key for each example."""
    if not x.ndim:
        return x
    old = jax.random.key_data(k.key)
    ways = [
        lambda: jax.random.split(k.key, len(x)),
        lambda: jax.vmap(lambda i: jax.random.fold_in(k.key, i))(jnp.arange(len(x))),
        lambda: jax.random.wrap_key_data(jax.random.split(old, len(x))),
        lambda: jax.random.split(k.key, (2, len(x)))[1],
    ]
    rate = 0.3 + 0.1 * (k.n // 4 % 4)
    row = x.shape[1:]
    drop = jax.vmap(lambda key, r: jnp.where(jax.random.bernoulli(key, rate, row), r, 0.2 * r))
    return drop(ways[k.n % 4](), x)


def plainly(x: Any) -> Any:
    return jnp.tanh(x - x.mean())


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return x / (1 + jnp.square(x).mean())


def _forward(x: Any) -> Any:
    return scaled(x), (x, jnp.abs(x).max())


def _backward(kept: Any, d: Any) -> Any:
    x, top = kept
    return (d / (1 + top) + 0.1 * x * d.sum() / x.size,)


scaled.defvjp(_forward, _backward)


@jax.custom_jvp
def centred(x: Any) -> Any:
    return jnp.tanh(x - x.mean(0))


@centred.defjvp
def _centred_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    y = centred(x)
    return y, (1 - y * y) * (dx - 0.5 * dx.mean(0)) * jnp.square(x).mean()


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 1


clipped.defvjp(lambda x: (x * 1, None), lambda _, d: (jnp.clip(d, -0.01, 0.02),))


@operation
def call(k: Known, x: Any, y: Any) -> Any:
    """Calls with a body."""
    w = k.params["s"][0].astype(x.dtype)
    if not x.ndim:
        return clipped(x)
    ways = [
        lambda: jax.checkpoint(plainly)(x),
        lambda: jax.checkpoint(lambda x, w: jnp.sin(x * w) * w, policy=None)(x, w),
        lambda: jax.jit(plainly)(x),
        lambda: jax.vmap(plainly)(x),
        lambda: jax.vmap(plainly, in_axes=-1, out_axes=-1)(x),
        lambda: scaled(x),
        lambda: jax.vmap(scaled)(x),
        lambda: centred(x),
        lambda: clipped(x * w),
        lambda: x * clipped(w) + clipped(x.mean()),
        lambda: jax.grad(lambda x: jnp.square(plainly(x)).sum())(x),
        lambda: x - 0.2 * jax.grad(lambda x: jnp.log(1 + jnp.square(x).mean()))(x) * len(x),
        lambda: jax.vmap(jax.grad(lambda r: jnp.sin(r).mean()))(x),
        lambda: jax.jvp(plainly, (x,), (jnp.cos(x),))[1],
        lambda: lax.stop_gradient(plainly(x)) * x,
        lambda: lax.associative_scan(lambda a, b: jnp.tanh(a + b), x),
        lambda: jnp.square(jax.jacfwd(lambda w: (x * w).mean(0))(w)) + x,
    ]
    return ways[k.n % len(ways)]()


@operation
def loop(k: Known, x: Any, y: Any) -> Any:
    """Loops over examples, over other dimensions, and over neither."""
    if not x.ndim:
        return lax.fori_loop(0, 3, lambda i, c: jnp.cos(c + i), x)
    w, rate = k.params["s"][1].astype(x.dtype), 0.5

    def cell(c: Any, r: Any) -> Any:
        c = jnp.tanh(rate * c + r * w)
        return c, c * 0.5

    last = jnp.moveaxis(x, -1, 0)
    total = jnp.zeros((), x.dtype)

    def accumulated(c: Any, r: Any) -> Any:
        return (c[0] + r.sum(), c[1] + 1), None

    ways = [
        lambda: lax.scan(cell, jnp.zeros_like(x[0]), x)[1],
        lambda: lax.scan(cell, jnp.zeros_like(last[0]), last)[1],
        lambda: lax.scan(jax.checkpoint(cell), jnp.ones_like(last[0]), last, reverse=True)[0],
        lambda: lax.map(plainly, x),
        lambda: lax.map(lambda r: jnp.sin(r) * w, x, batch_size=2),
        lambda: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c + 0.1 * x.mean() * i), x),
        lambda: lax.while_loop(lambda c: jnp.abs(c).max() > 0.4, lambda c: c * 0.7, x_still(x)),
        lambda: lax.cond(x.mean() > 0, lambda x: x * w, lambda x: jnp.ones_like(x) * w, x),
        lambda: lax.switch(k.batch["tokens"].sum() % 3, [jnp.sin, plainly, lambda x: x * 0.5], x),
        lambda: x + lax.scan(accumulated, (total, 0), last)[0][0] / x.size,
        lambda: lax.scan(lambda c, _: (plainly(c * w), c.sum() / x.size), x, None, length=3)[1],
        lambda: (
            lax.scan(lambda c, r: (c + r.sum(0) / x.size, r - c.mean()), last[0][0] * 0, last)[1]
            if x.ndim > 1
            else x
        ),
        lambda: lax.scan(cell, x.mean(0), jnp.stack([x.mean(0), x.max(0)]))[0],
        lambda: x * lax.cond(y.mean() > 0, lambda: x.sum() / x.size, lambda: jnp.ones((), x.dtype)),
        lambda: (
            lax.scan(
                lambda c, i: (c + lax.dynamic_index_in_dim(x, i, 0, False), None),
                x[0],
                jnp.arange(len(x)),
            )[0]
            / len(x)
        ),
        lambda: lax.fori_loop(0, 2, lambda i, c: c.at[i].set(c[i] * 0.5), x),
        lambda: lax.scan(lambda c, r: (c * 0.9 + (r * w).mean(), c), total, jnp.stack([x, x * 2]))[
            0
        ],
    ]
    return ways[k.n % len(ways)]()


def x_still(x: Any) -> Any:
    return lax.stop_gradient(x)


FINALS: dict[str, Any] = {
    "mean": lambda x, m: x.mean(),
    "masked mean": lambda x, m: (x * m).sum() / m.sum(),
    "guarded mean": lambda x, m: (x * m).sum() / jnp.maximum(m.sum(), 1),
    "where mean": lambda x, m: jnp.mean(x, where=m > 0),
    "mean of means": lambda x, m: ((x * m).sum(-1) / jnp.maximum(m.sum(-1), 1)).mean(),
    "sum": lambda x, m: x.sum() / 16,
    "rmse": lambda x, m: jnp.sqrt(jnp.square(x).mean() + 0.1),
    "max": lambda x, m: x.max(),
    "logsumexp": lambda x, m: jax.nn.logsumexp(x),
    "product": lambda x, m: x.mean() * (1 + jnp.sin(x).mean()),
    "quotient": lambda x, m: x.sum() / (1 + jnp.square(x).sum()),
    "std": lambda x, m: jnp.sqrt(x.var() + 0.1),
    "penalty": lambda x, m: (x * m).sum() / m.sum() + 0.1 * jnp.abs(x).mean(),
    "scaled quotient": lambda x, m: -2 * ((x * m).sum() / m.sum()),
    "first": lambda x, m: x.reshape(-1)[0],
    "vdot": lambda x, m: jnp.vdot(x, m) / x.size,
    "narrow": lambda x, m: (x.mean().astype(jnp.bfloat16) * 2).astype(F32),
    "count": lambda x, m: x.sum() / (m > 0).sum(),
    "steps": lambda x, m: x.sum() / (m.shape[0] - (m.reshape(len(m), -1)[:, 0] > 9).sum()),
}


def loss_of(program: Program, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
    """Runs a program; aux holds scalars, examples and integers."""
    x = jnp.tanh(batch["x"] @ params["w"][: batch["x"].shape[-1], : batch["x"].shape[-1]])
    pool = [params["s"], batch["z"] * params["s"][: batch["z"].shape[-1]], x]
    for name, i, j, n in program.steps:
        x, y = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]
        found = jnp.asarray(OPERATIONS[name](Known(params, batch, key, n), x, y), x.dtype)
        if 0 < found.size <= LARGEST and found.ndim <= 4:
            pool.append(found)
    x = pool[-1] if pool[-1].ndim else pool[-1][None]
    mask = batch["mask"].reshape(-1, *[1] * (x.ndim - 1)) if len(x) == len(batch["mask"]) else 1.0
    loss = FINALS[program.final](x, jnp.broadcast_to(mask, x.shape).astype(x.dtype))
    aux = {
        "scalar": x.mean() * 2,
        "count": (x > 0.1).sum() + len(x),
        "top": jnp.max(x),
        "quotient": (x * mask).sum() / jnp.sum(mask),
        "any": jnp.any(x > 1),
    }
    return loss.astype(batch["x"].dtype), aux


def arrays_of(program: Program, seed: int, dtype: Any) -> tuple[Any, Any]:
    """Parameters and a batch."""
    examples, time, features = program.sizes
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype)

    params = {"w": normal(16, 16) / 2, "b": normal(16) / 2, "s": normal(16) / 4 + 1}
    mask = rng.random(examples) < np.linspace(0.2, 1, examples)
    mask[0] = True
    batch = {
        "x": normal(examples, time, features),
        "z": normal(examples, features),
        "y": jnp.asarray(rng.integers(0, 50, examples)),
        "tokens": jnp.asarray(rng.integers(0, 8, (examples, time))),
        "mask": jnp.asarray(mask, dtype),
    }
    return params, batch


STEPS = st.builds(
    Step,
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 45),
)
PROGRAMS = st.builds(
    Program,
    st.sampled_from(SIZES),
    st.lists(STEPS, min_size=1, max_size=5).map(tuple),
    st.sampled_from(sorted(FINALS)),
)
