"""The models that are timed, small enough for two cores: the loss, its parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from examples.gpt import BYTES, GPT, next_byte_loss


class Problem(NamedTuple):
    """Something to train.

    Attributes:
      loss_fn: `loss_fn(params, batch)`, a mean over examples.
      params: full, on the host.
      batch: from a number of examples to an array of them.
      stacks: subtrees of `params` whose dimension 0 a scan iterates over.
      learning_rate: of AdamW.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Callable[[int], np.ndarray]
    stacks: tuple[str, ...] = ()
    learning_rate: float = 1e-3


class ResidualMLP(nn.Module):
    """Matrix products and nothing that needs explaining."""

    width: int
    layers: int
    dot: Any = None  # Flax's class of products, such as those in float8

    @nn.compact
    def __call__(self, x_BxD):
        dense = partial(nn.Dense, dot_general_cls=self.dot)
        for _ in range(self.layers):
            h_BxF = nn.gelu(dense(4 * self.width)(x_BxD))
            x_BxD = x_BxD + dense(self.width)(h_BxF)
        return x_BxD


def mlp(width: int = 256, layers: int = 4, float8: bool = False) -> Problem:
    model = ResidualMLP(width, layers, nn.Fp8DirectDotGeneralOp if float8 else None)
    rng = np.random.default_rng(0)

    def loss_fn(params, x_BxD):
        variables = params if float8 else {"params": params}  # float8 has statistics as well
        return jnp.square(model.apply(variables, x_BxD) - x_BxD[:, ::-1]).mean()

    def batch(examples: int) -> np.ndarray:
        return rng.normal(size=(examples, width)).astype(np.float32)

    variables = _whole(model, batch(1))
    params = variables if float8 else variables["params"]
    return Problem(loss_fn, params, batch, learning_rate=min(1e-3, 0.064 / width))


def gpt(
    width: int = 192,
    layers: int = 4,
    length: int = 32,
    scan: bool = False,
    remat: bool = False,
    experts: int = 0,
) -> Problem:
    model = GPT(width, layers, heads=4, scan=scan, remat=remat, experts=experts)
    rng = np.random.default_rng(0)

    def batch(examples: int) -> np.ndarray:
        return rng.integers(0, BYTES, size=(examples, length + 1)).astype(np.uint8)

    params = nn.meta.unbox(_whole(model, batch(1)[:, :-1])["params"])
    return Problem(partial(next_byte_loss, model), params, batch, ("blocks",) if scan else ())


def _whole(model: nn.Module, x: np.ndarray) -> Any:
    return jax.tree.map(np.asarray, model.init(jax.random.key(0), x))


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "mlp": mlp,
    "gpt": gpt,
    "gpt-scan": partial(gpt, scan=True),
}
