"""Llama at the sizes of Llama 2 7B, and smaller ones of its shape: heads of 128 features."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gshard._util.errors import GShardError
from gshard.models import llama


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that a benchmark varies; the defaults are those of Llama 2 7B."""

    layers: int = 32
    width: int = 4096
    vocabulary: int = 32000
    sequence: int = 2048

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.width % 128:
            raise GShardError(
                f"{self} cannot be: each is at least 1, and the width a multiple of 128 (one head)."
            )

    def model(self, batch_sharding: NamedSharding | None = None) -> llama.Llama:
        """Computes in bfloat16, and keeps nothing of a layer for the backward pass."""
        heads = self.width // 128
        # Two thirds of four times the width, rounded up to a multiple of 256.
        mlp = -(-(8 * self.width // 3) // 256) * 256
        sizes = llama.Sizes(self.layers, self.width, heads, heads, mlp, self.vocabulary)
        return llama.Llama(sizes, batch_sharding=batch_sharding)


def abstract_params(sizes: Sizes) -> Any:
    """Shapes and dtypes of the parameters; `layers` is a stack that a scan iterates over."""
    tokens_1xT = jax.ShapeDtypeStruct((1, sizes.sequence), jnp.int32)
    init = sizes.model().init
    return jax.eval_shape(init, jax.random.key(0), tokens_1xT, tokens_1xT)["params"]


def loss_of(params, batch, sizes: Sizes, batch_sharding: NamedSharding | None = None):
    """The loss of a batch of `tokens` and `next`, each (B, T) integers."""
    return sizes.model(batch_sharding).apply({"params": params}, batch["tokens"], batch["next"])
