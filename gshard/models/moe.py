"""A mixture of experts in Flax Linen: Llama with experts for its MLP, as Mixtral has them.

Tokens go to their experts by one-hot products, which every compiler makes fast (Lepikhin et al.,
2020, section 3.2). Unlike Mixtral's, an expert takes a limited number of tokens of each group of
adjacent ones; a token that finds its expert full goes past it. No token depends on other sequences,
nor on how many devices share them. Experts are sharded like all other parameters, and no token
leaves its device, unless `keep=` keeps experts on an axis of the mesh (docs/expert.md).

Letters in names: B sequences, T tokens of each, G groups of S tokens, D width, X experts, C tokens
that one takes of a group, F width of its MLP, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import gshard
from gshard.expert.routing import places_of
from gshard.models import llama
from gshard.models.by_slices import cross_entropy, slice_of
from gshard.models.training import DTYPES, REMAT, STACK, named, need, setup_of, stack_of

# "exchange" saves what other devices sent to experts and back, so that it is sent once.
_REMAT = REMAT | {"exchange": jax.checkpoint_policies.save_only_these_names("expert_exchange")}

EXPERT_INIT = nn.initializers.lecun_normal(batch_axis=(0,))


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens find experts.

    The defaults of `experts`, `chosen` and `balance` are those of Mixtral 8x7B (Jiang et al.,
    2024), whose experts have no capacity.

    Attributes:
      experts: of a layer.
      chosen: how many a token goes to.
      capacity: tokens that an expert takes, in multiples of its fair share of a group.
      group: tokens that share that capacity; shorter sequences are one group.
      balance: weight in the loss of how unevenly experts are used, 1 where they are used alike.
        Hugging Face's is `chosen` there: its `router_aux_loss_coef` of 0.02 is 0.04 here.
    """

    experts: int = 8
    chosen: int = 2
    capacity: float = 1.25
    group: int = 512
    balance: float = 0.04

    def __post_init__(self) -> None:
        possible = 0 < self.chosen <= self.experts
        need(possible, f"chosen={self.chosen} must be from 1 to experts={self.experts}")
        need(self.group > 0, f"group={self.group} must be at least 1")
        possible = 0 < self.capacity < math.inf
        need(possible, f"capacity={self.capacity} must be a number above 0, such as 1.25")

    def slots(self, tokens: int) -> int:
        """Tokens that an expert takes of a group."""
        return places_of(tokens, self.chosen, self.experts, self.capacity)


class Experts(nn.Module):
    """Each token through the gated MLPs that a router chooses for it.

    Returns the sum of their outputs, weighted by the router, and how unevenly it chose: 1 where all
    experts are used alike, X / `chosen` where all tokens go to the same (Fedus et al., 2021,
    section 2.2). It is a mean over groups, so devices with sequences of their own give what one
    device gives.
    """

    mlp: int
    routing: Routing
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> Any:
        (B, T, D), F, X = x_BxTxD.shape, self.mlp, self.routing.experts
        S = min(self.routing.group, T)
        fits = T > 0 and T % S == 0
        need(fits, f"a sequence of {T} tokens must be a multiple of group={self.routing.group}")
        C = self.routing.slots(S)
        x_GxSxD = x_BxTxD.reshape(B * T // S, S, D)

        # Which expert it is depends on small differences: the router computes in float32, on a TPU
        # too, where the default precision is that of bfloat16.
        exact = {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        router = nn.Dense(X, use_bias=False, name="router", **exact)
        scores_GxSxX = router(x_GxSxD)
        _, best_GxSxK = jax.lax.top_k(scores_GxSxX, self.routing.chosen)
        chosen_GxSxX = jax.nn.one_hot(best_GxSxK, X, dtype=jnp.int32).sum(axis=2)
        weight_GxSxX = nn.softmax(jnp.where(chosen_GxSxX > 0, scores_GxSxX, -jnp.inf))
        used_GxX, wanted_GxX = chosen_GxSxX.mean(1), nn.softmax(scores_GxSxX).mean(1)
        uneven = X / self.routing.chosen * (used_GxX * wanted_GxX).sum(-1).mean()

        # Earlier tokens first: none depends on a later one. A place of C or above is no one-hot.
        place_GxSxX = jnp.cumsum(chosen_GxSxX, axis=1) - chosen_GxSxX
        to_GxSxXxC = chosen_GxSxX[..., None] * jax.nn.one_hot(place_GxSxX, C, dtype=self.dtype)
        back_GxSxXxC = weight_GxSxX[..., None].astype(self.dtype) * to_GxSxXxC
        x_XxGxCxD = jnp.einsum("GSXC,GSD->XGCD", to_GxSxXxC, x_GxSxD)

        def dense(x_XxGxCxI, features: int, name: str):
            shape = X, x_XxGxCxI.shape[-1], features
            kernel_XxIxO = self.param(name, EXPERT_INIT, shape, jnp.float32).astype(self.dtype)
            return jnp.einsum("XGCI,XIO->XGCO", x_XxGxCxI, kernel_XxIxO)

        h_XxGxCxF = nn.silu(dense(x_XxGxCxD, F, "gate")) * dense(x_XxGxCxD, F, "up")
        y_XxGxCxD = dense(h_XxGxCxF, D, "down")
        y_GxSxD = jnp.einsum("GSXC,XGCD->GSD", back_GxSxXxC, y_XxGxCxD)
        return y_GxSxD.reshape(B, T, D), uneven


class Block(nn.Module):
    """Attention, then experts; each sees a normalized copy of the stream."""

    sizes: llama.Sizes
    routing: Routing
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: Any) -> Any:
        h_BxTxD = nn.RMSNorm(self.sizes.epsilon, dtype=self.dtype, name="attention_norm")(x_BxTxD)
        x_BxTxD += llama.Attention(self.sizes, self.dtype, name="attention")(h_BxTxD)
        h_BxTxD = nn.RMSNorm(self.sizes.epsilon, dtype=self.dtype, name="experts_norm")(x_BxTxD)
        experts = Experts(self.sizes.mlp, self.routing, self.dtype, name="experts")
        y_BxTxD, uneven = experts(h_BxTxD)
        return x_BxTxD + y_BxTxD, uneven


class MoE(nn.Module):
    """The mean cross-entropy of every token given the ones before it, in nats, and the balance.

    All next tokens count; one that is not from 0 to V - 1, such as -100, makes the loss and its
    gradient NaN.

    Attributes:
      sizes: as of Llama; `mlp` is the width of one expert.
      routing: how tokens find experts.
      dtype: what is computed in, but for the router.
      remat: what the backward pass finds of a layer, a policy of `jax.checkpoint`.
    """

    sizes: llama.Sizes
    routing: Routing = Routing()
    dtype: Any = jnp.bfloat16
    remat: Any = REMAT["full"]

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, next_BxT: jax.Array) -> Any:
        D, V, T = self.sizes.width, self.sizes.vocabulary, tokens_BxT.shape[1]
        embed = nn.Embed(V, D, dtype=self.dtype, name="embed")
        x_BxTxD = embed(tokens_BxT.astype(jnp.int32))  # as in Llama: bytes are too narrow
        layers = stack_of(Block, self.sizes.layers, self.remat)
        layers = layers(self.sizes, self.routing, self.dtype, name=STACK)
        x_BxTxD, uneven_L = layers(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(self.sizes.epsilon, dtype=self.dtype, name="norm")(x_BxTxD)
        head_DxV = self.param("head", nn.initializers.lecun_normal(), (D, V), jnp.float32)
        head_DxV = head_DxV.astype(self.dtype)
        loss = cross_entropy(x_BxTxD, head_DxV, next_BxT, slice_of(T)).mean() / T
        return loss + self.routing.balance * uneven_L.mean()


def setup(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    mlp: int = 14336,
    vocabulary: int = 32000,
    theta: float = 1e6,
    experts: int = 8,
    chosen: int = 2,
    capacity: float = 1.25,
    group: int = 512,
    sequence: int = 4096,
    dtype: str = "bfloat16",
    remat: str = "full",
    precision: str | None = None,
    optimizer: str = "adamw",
    learning_rate: float = 3e-4,
    seed: int = 0,
) -> gshard.TrainSetup:
    """A mixture of experts of any size; the defaults have the sizes of Mixtral 8x7B.

    Args:
      layers, width, heads, kv_heads, mlp, vocabulary, theta: see `llama.Sizes`.
      experts, chosen, capacity, group: see `Routing`.
      sequence: tokens of one example, a multiple of `group`, or fewer.
      dtype: `"bfloat16"` or `"float32"`, what is computed in, but for the router.
      remat: what is kept of a layer for the backward pass: `"none"` computes nothing again,
        `"dots"` keeps the products with weights of attention, `"full"` keeps a layer's input alone,
        `"exchange"` keeps that and what experts on other devices receive and return.
      precision, optimizer, learning_rate, seed: see `setup_of`.
    """
    sizes = llama.Sizes(layers, width, heads, kv_heads, mlp, vocabulary, theta=theta)
    routing = Routing(experts, chosen, capacity, group)
    fits = sequence < group or sequence % group == 0
    need(fits, f"sequence={sequence} must be a multiple of group={group}, or shorter")
    return setup_of(
        MoE(sizes, routing, named("dtype", dtype, DTYPES), named("remat", remat, _REMAT)),
        sequence,
        optimizer=optimizer,
        learning_rate=learning_rate,
        precision=precision,
        seed=seed,
    )
