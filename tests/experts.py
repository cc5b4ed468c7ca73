"""Small mixtures of experts, written for one device, and what one device computes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard

D, F, E, K, V = 16, 24, 8, 2, 40
KEEP = {"experts/": ("expert", 0)}
DATA_EXPERT = {"shape": {"data": 2, "expert": 4}}


def params(seed: int = 0, experts: int = E) -> Any:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "embed": normal(V, D),
        "router": normal(D, experts),
        "experts": {"up": normal(experts, D, F), "down": normal(experts, F, D)},
        "head": normal(D, V),
    }


def batch(seed: int = 1, examples: int = 24, tokens: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = examples, tokens
    return {
        "x": rng.integers(0, V, shape),
        "y": rng.integers(0, V, shape),
        "mask": (rng.random(shape) < 0.6).astype(np.float32),
    }


def _weights(p: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(batch, tokens, experts): the weight of each expert, and its probability."""
    probabilities = jax.nn.softmax(h @ p["router"])
    weights, indices = jax.lax.top_k(probabilities, K)
    weights = weights / weights.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(indices, p["router"].shape[1])
    return jnp.einsum("btk,btke->bte", weights, chosen), probabilities


def every_token(p: Any, h: jax.Array) -> jax.Array:
    """Every expert computes every token: products in which only weights have experts."""
    up = jnp.einsum("btd,edf->betf", h, p["experts"]["up"])
    y = jnp.einsum("betf,efd->betd", jax.nn.silu(up), p["experts"]["down"])
    return jnp.einsum("bte,betd->btd", _weights(p, h)[0], y)


def one_hot(p: Any, h: jax.Array, capacity: int = 2) -> jax.Array:
    """Tokens go to experts of limited capacity by one-hot products."""
    weights, _ = _weights(p, h)
    chosen = (weights > 0).astype(jnp.int32)
    to = chosen[..., None] * jax.nn.one_hot(jnp.cumsum(chosen, 1) - chosen, capacity)
    x = jnp.einsum("btec,btd->ebcd", to, h)
    up = jnp.einsum("ebcd,edf->ebcf", x, p["experts"]["up"])
    y = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(up), p["experts"]["down"])
    return jnp.einsum("btec,ebcd->btd", weights[..., None] * to, y)


def dispatched(p: Any, h: jax.Array, factor: float = 1.25) -> jax.Array:
    """The same by `gshard.expert`."""
    routing = gshard.expert.route(h @ p["router"], K, capacity_factor=factor)
    x = gshard.expert.dispatch(h, routing)
    up = jnp.einsum("egcd,edf->egcf", x, p["experts"]["up"])
    y = jnp.einsum("egcf,efd->egcd", jax.nn.silu(up), p["experts"]["down"])
    return gshard.expert.combine(y, routing)


def dropless(p: Any, h: jax.Array, by: Any = "gather") -> jax.Array:
    """Every token goes to its experts, as rows that are sorted by expert."""

    def experts(p: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        inner = jax.nn.silu(jax.lax.ragged_dot(rows, p["up"], sizes))
        return jax.lax.ragged_dot(inner, p["down"], sizes)

    routing = gshard.expert.route(h @ p["router"], K, capacity_factor=None)
    return gshard.expert.dropless(experts, p["experts"], h, routing, by=by)


MODELS = {
    "every token": every_token,
    "one-hot": one_hot,
    "gshard.expert": dispatched,
    "dropless": dropless,
    "dropless, sent": functools.partial(dropless, by="all_to_all"),
}


def mean_loss(model: str, balance: bool = False) -> Callable[[Any, Any], jax.Array]:
    """The mean cross-entropy of tokens, with a balancing product of two means of the batch."""

    def loss(p: Any, batch: Any) -> jax.Array:
        h = jnp.tanh(p["embed"][batch["x"]])
        out = (h + MODELS[model](p, h)) @ p["head"]
        found = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"]).mean()
        if balance:
            weights, probabilities = _weights(p, h)
            found += 0.1 * E * ((weights > 0).mean((0, 1)) * probabilities.mean((0, 1))).sum()
        return found

    return loss


def masked_loss(p: Any, batch: Any) -> jax.Array:
    """A mean over unequal numbers of tokens, with dropped tokens."""
    h = jnp.tanh(p["embed"][batch["x"]])
    out = (h + one_hot(p, h)) @ p["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def clipped_adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-5))


def sharded(mesh: dict[str, Any], level: Any, p: Any = None, tx: Any = None, **options) -> Any:
    """A state and its plan, with the experts kept."""
    options = {"keep": KEEP, "min_shard_size": 0} | options
    given = (params() if p is None else p, tx or clipped_adamw())
    return gshard.shard_train_state(given, gshard.make_mesh(**mesh), level, **options)


def worst(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each array."""

    def one(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        x = x[tuple(map(slice, y.shape))]  # without padding
        return float(np.abs(x - y).max() / np.abs(y).max())

    return max(jax.tree.leaves(jax.tree.map(one, found, wanted)))
