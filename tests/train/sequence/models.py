"""Models and losses of full sequences, and their gradients with sharded sequences."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard

B, T, D, V = 24, 48, 16, 23


class Block(nn.Module):
    """A layer of Flax's own attention, or of `gshard.sequence.attention` with options."""

    how: tuple[tuple[str, Any], ...] = ()
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask=None):
        h = nn.LayerNorm()(x)
        if self.how:
            q = nn.DenseGeneral((8, 3))(h)
            k, v = (nn.DenseGeneral((2, 3))(h) for _ in range(2))
            out = gshard.sequence.attention(q, k, v, **dict(self.how))
            x = x + nn.DenseGeneral(D, axis=(-2, -1))(out)
        else:
            mask = nn.make_causal_mask(x[..., 0]) if mask is None else mask
            x = x + nn.MultiHeadDotProductAttention(4)(h, h, mask=mask)
        h = nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.rate, deterministic=not self.rate)(h)


class Model(nn.Module):
    """A layer, or a scan over two, and what else mixes positions by `parts`."""

    parts: tuple[str, ...] = ()
    how: tuple[tuple[str, Any], ...] = ()
    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, documents=None):
        x = nn.Embed(V, D)(tokens) + nn.Embed(T, D)(jnp.arange(tokens.shape[1]))
        block = nn.remat(Block) if "remat" in self.parts else Block
        if "scan" in self.parts:
            scan = {"variable_axes": {"params": 0}, "length": 2}
            scan["split_rngs"] = {"params": True, "dropout": True}
            step = nn.scan(lambda layer, x, _: (layer(x), None), **scan)
            x, _ = step(block(self.how, self.rate), x, None)
        else:
            mask = nn.make_causal_mask(tokens)
            if documents is not None:
                same = nn.make_attention_mask(documents, documents, jnp.equal)
                mask = nn.combine_masks(mask, same)
            x = block(self.how, self.rate)(x, mask)
        for part in self.parts:
            x = x + PARTS[part](x) if part in PARTS else x
        return nn.Dense(V)(nn.LayerNorm()(x))


PARTS: dict[str, Any] = {
    "convolution": lambda x: nn.Conv(D, (3,), padding="CAUSAL")(x),
    "cumulative sum": lambda x: jnp.cumsum(x, 1) / T,
    "pooling": lambda x: x.mean(1, keepdims=True) + x.max(1, keepdims=True),
    "blocks of two sequences": lambda x: jnp.concatenate([x, 2 * x], 1)[:, T // 2 : -T // 2],
    "reversed": lambda x: x[:, ::-1],
    "recurrent": lambda x: nn.RNN(nn.GRUCell(D))(x),
    "batch norm": lambda x: nn.BatchNorm(use_running_average=False)(x),
    "rotary": lambda x: x * jnp.cos(jnp.arange(x.shape[1])[:, None] / 10),
}


@functools.cache
def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, V, (B, T)),
        "y": rng.integers(0, V, (B, T)),
        "mask": (rng.random((B, T)) < 0.6).astype(np.float32),
        "documents": np.sort(rng.integers(0, 3, (B, T)), 1),
    }


@functools.cache
def init(model: Model) -> Any:
    return jax.jit(model.init)(jax.random.key(0), batch()["x"][:1])["params"]


def losses(model: Model, params: Any, batch: Any, **options: Any) -> jax.Array:
    """The cross entropy at every position, (B, T)."""
    documents = batch["documents"] if "documents" in model.parts else None
    mutable = ["batch_stats"] if "batch norm" in model.parts else False
    out = model.apply({"params": params}, batch["x"], documents, mutable=mutable, **options)
    out = out[0] if mutable else out
    return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])


REDUCED: dict[str, Any] = {
    "mean": lambda found, mask: found.mean(),
    "masked mean": lambda found, mask: (found * mask).sum() / mask.sum(),
    "weighted": lambda found, mask: gshard.Weighted((found * mask).sum(), mask.sum()),
    "root of the mean square": lambda found, mask: jnp.sqrt(jnp.square(found).mean()),
    "mean of each sequence": lambda found, mask: ((found * mask).sum(1) / (1 + mask.sum(1))).mean(),
    "next tokens": lambda found, mask: found[:, 1:].mean(),
}


def loss_of(model: Model, reduced: str = "mean") -> Any:
    def loss(params: Any, batch: Any) -> Any:
        return REDUCED[reduced](losses(model, params, batch), batch["mask"])

    return loss


def on_one_device(loss: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    def value(params: Any) -> Any:
        out = loss(params, batch)
        return out.sum / out.weight if isinstance(out, gshard.Weighted) else out

    return jax.jit(jax.value_and_grad(value))(params)


def sharded(
    params: Any, level: str = "p_g_os", order: str = "contiguous", devices: int = 8, **mesh: int
) -> Any:
    """A train state of SGD, and its plan."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices], **mesh)
    state = (params, optax.sgd(0.1))
    return gshard.shard_train_state(state, mesh, level, min_shard_size=0, sequence_order=order)


def assert_gradients(
    loss: Any, params: Any, found: Any, within: float = 2e-6, given: Any = None
) -> None:
    """Compares loss and gradient, of each array to its largest entry, with one device."""
    value, grads = found
    expected, wanted = on_one_device(loss, params, batch() if given is None else given)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    wanted = jax.tree_util.tree_flatten_with_path(wanted)[0]
    # Gradients of the biases of keys are 0 but for rounding.
    least = max(np.abs(y).max() for _, y in wanted) / 20
    for x, (path, y) in zip(jax.tree.leaves(grads), wanted, strict=True):
        x = np.asarray(x)[tuple(map(slice, y.shape))]  # without padding
        largest = max(np.abs(y).max(), least)
        np.testing.assert_allclose(x / largest, y / largest, rtol=0, atol=within, err_msg=str(path))


def forward(rows: Iterable[Any]) -> Counter[str]:
    """Elements of a loss's forward pass by kind: of a budget's rows, or of an audit's."""
    found: Counter[str] = Counter()
    for x in rows:
        if x.purpose == "loss" and not getattr(x, "backward", False):
            found[x.kind] += x.elements
    return found
