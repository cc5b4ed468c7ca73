"""Models of `benchmarks.advice` that are not in `examples/`, with blocks that may be recomputed."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import gshard
from benchmarks.models import ResidualMLP

Loss = Callable[[jax.Array, jax.Array], jax.Array]


class ConvBlock(nn.Module):
    """Two convolutions, added to their input."""

    width: int

    @nn.compact
    def __call__(self, x_BxHxWxC):
        h_BxHxWxC = nn.relu(nn.Conv(self.width, (3, 3))(nn.LayerNorm()(x_BxHxWxC)))
        return x_BxHxWxC + nn.Conv(self.width, (3, 3))(h_BxHxWxC)


class ConvNet(nn.Module):
    """Images to classes, at two resolutions."""

    width: int
    blocks: int
    remat: bool

    @nn.compact
    def __call__(self, x_BxHxWxC):
        block = nn.remat(ConvBlock) if self.remat else ConvBlock
        for i, width in enumerate((self.width, 2 * self.width)):
            x_BxHxWxC = nn.Conv(width, (3, 3), strides=(2, 2))(x_BxHxWxC)
            for j in range(self.blocks):
                x_BxHxWxC = block(width, name=f"block_{i}_{j}")(x_BxHxWxC)
        return nn.Dense(100)(x_BxHxWxC.mean((-3, -2)))


class BlockMLP(nn.Module):
    """Residual blocks of `benchmarks.models`, each with two products."""

    width: int
    layers: int
    remat: bool

    @nn.compact
    def __call__(self, x_BxTxD):
        block = nn.remat(ResidualMLP) if self.remat else ResidualMLP
        for i in range(self.layers):
            x_BxTxD = block(self.width, 1, name=f"block_{i}")(x_BxTxD)
        return x_BxTxD


def mlp(width: int = 256, layers: int = 4, tokens: int = 16, remat: str = "none"):
    """A multilayer perceptron that learns to reverse features."""

    def loss(y_BxTxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
        return jnp.square(y_BxTxD - x_BxTxD[..., ::-1]).mean()

    model = BlockMLP(width, layers, remat == "full")
    return _setup(model, (tokens, width), loss)


def conv(width: int = 64, blocks: int = 2, side: int = 16, remat: str = "none"):
    """A convolutional network."""

    def loss(logits_BxV: jax.Array, x_BxHxWxC: jax.Array) -> jax.Array:
        labels_B = (10 * jnp.abs(x_BxHxWxC[:, 0, 0, 0])).astype(jnp.int32) % 100
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxV, labels_B).mean()

    return _setup(ConvNet(width, blocks, remat == "full"), (side, side, 3), loss)


def _setup(model: nn.Module, shape: tuple[int, ...], loss: Loss) -> gshard.TrainSetup:
    x = jnp.zeros((1, *shape))

    def state():
        return model.init(jax.random.key(0), x)["params"], optax.adamw(1e-3)

    def loss_fn(params, x):
        y: jax.Array = model.apply({"params": params}, x)
        return loss(y, x)

    return gshard.TrainSetup(state, loss_fn, x)
