"""Llama in Flax Linen at the sizes of Llama 2 7B, written to need little memory.

Nothing of a layer is kept for the backward pass, and attention and the cross-entropy go over
slices of the sequence. Nothing here knows about gshard; with `rows` given, activations are
constrained to lie by rows, as GSPMD likes to be told.

Letters in names: B sequences, T tokens of each, D width, H heads, E features of a head, F width of
the MLP, V vocabulary, N slices of C tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gshard.errors import GShardError


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model; the defaults are those of Llama 2 7B (Touvron et al., 2023)."""

    layers: int = 32
    width: int = 4096
    vocabulary: int = 32000
    sequence: int = 2048

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.width % 128 or self.sequence % self.slice:
            raise GShardError(
                f"{self} cannot be: the width is a multiple of 128 (one head), and the sequence "
                "of 128 or shorter than that."
            )

    @property
    def heads(self) -> int:
        return self.width // 128

    @property
    def mlp(self) -> int:
        """Two thirds of four times the width, rounded up to a multiple of 256."""
        return -(-(8 * self.width // 3) // 256) * 256

    @property
    def slice(self) -> int:
        """Tokens that attention and the cross-entropy take at a time."""
        return min(128, self.sequence)


def hold(x, rows: NamedSharding | None):
    """Constrains an array to lie by rows, where that is wanted."""
    return x if rows is None else jax.lax.with_sharding_constraint(x, rows)


def slices(x_BxTx, size: int):
    """(B, T, ...) to (N, B, C, ...): what a scan over slices of the sequence walks."""
    x_BxNxCx = x_BxTx.reshape(x_BxTx.shape[0], -1, size, *x_BxTx.shape[2:])
    return jnp.moveaxis(x_BxNxCx, 1, 0)


def rotate(x_BxTxHxE):
    """Rotary positions: pairs of features turned by an angle that grows with the position."""
    T, E = x_BxTxHxE.shape[1], x_BxTxHxE.shape[-1]
    angle_Tx1xP = jnp.arange(T)[:, None, None] * 10000.0 ** -(jnp.arange(E // 2) / (E // 2))
    cos, sin = jnp.cos(angle_Tx1xP), jnp.sin(angle_Tx1xP)
    a, b = jnp.split(x_BxTxHxE.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x_BxTxHxE.dtype)


def attend(q_BxTxHxE, k_BxTxHxE, v_BxTxHxE, size: int):
    """Causal attention, a slice of queries at a time."""
    B, T, H, E = q_BxTxHxE.shape

    @jax.checkpoint
    def of_slice(start, q_BxCxHxE):
        scores_BxHxCxT = jnp.einsum(
            "BCHE,BTHE->BHCT", q_BxCxHxE, k_BxTxHxE, preferred_element_type=jnp.float32
        )
        seen_CxT = start + jnp.arange(size)[:, None] >= jnp.arange(T)
        weights_BxHxCxT = nn.softmax(jnp.where(seen_CxT, scores_BxHxCxT * E**-0.5, -1e30))
        weights_BxHxCxT = weights_BxHxCxT.astype(v_BxTxHxE.dtype)
        y_BxCxHxE = jnp.einsum("BHCT,BTHE->BCHE", weights_BxHxCxT, v_BxTxHxE)
        return start + size, y_BxCxHxE

    _, y_NxBxCxHxE = jax.lax.scan(of_slice, 0, slices(q_BxTxHxE, size))
    return jnp.moveaxis(y_NxBxCxHxE, 0, 1).reshape(B, T, H, E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(x_BxTxD, head_DxV, next_BxT, size: int):
    """Cross-entropy of the next tokens, summed over each sequence, a slice of tokens at a time.

    What the backward pass keeps of a slice is the logarithm of its normaliser. It also makes the
    backward pass wait for the forward pass: otherwise a compiler may compute the loss, which
    nothing but the log needs, at the very end, and keep the whole head until then.
    """
    return _cross_entropy_forward(x_BxTxD, head_DxV, next_BxT, size)[0]


def _cross_entropy_forward(x_BxTxD, head_DxV, next_BxT, size: int):
    def of_slice(sum_B, walked):
        x_BxCxD, next_BxC = walked
        logits_BxCxV = jnp.matmul(x_BxCxD, head_DxV, preferred_element_type=jnp.float32)
        norm_BxC = nn.logsumexp(logits_BxCxV, axis=-1)
        right_BxC = jnp.take_along_axis(logits_BxCxV, next_BxC[..., None], axis=-1)[..., 0]
        return sum_B + (norm_BxC - right_BxC).sum(1), norm_BxC

    nothing_B = jnp.zeros(x_BxTxD.shape[0], jnp.float32)
    walked = slices(x_BxTxD, size), slices(next_BxT, size)
    sum_B, norm_NxBxC = jax.lax.scan(of_slice, nothing_B, walked)
    return sum_B, (x_BxTxD, head_DxV, next_BxT, norm_NxBxC)


def _cross_entropy_backward(size: int, kept, d_sum_B):
    x_BxTxD, head_DxV, next_BxT, norm_NxBxC = kept
    V, dtype = head_DxV.shape[1], head_DxV.dtype

    def of_slice(d_head_DxV, walked):
        x_BxCxD, next_BxC, norm_BxC = walked
        logits_BxCxV = jnp.matmul(x_BxCxD, head_DxV, preferred_element_type=jnp.float32)
        d_BxCxV = jnp.exp(logits_BxCxV - norm_BxC[..., None]) - jax.nn.one_hot(next_BxC, V)
        d_BxCxV = (d_BxCxV * d_sum_B[:, None, None]).astype(dtype)
        d_head_DxV += jnp.einsum("BCD,BCV->DV", x_BxCxD, d_BxCxV)
        return d_head_DxV, jnp.einsum("BCV,DV->BCD", d_BxCxV, head_DxV)

    walked = slices(x_BxTxD, size), slices(next_BxT, size), norm_NxBxC
    d_head_DxV, d_x_NxBxCxD = jax.lax.scan(of_slice, jnp.zeros_like(head_DxV), walked)
    return jnp.moveaxis(d_x_NxBxCxD, 0, 1).reshape(x_BxTxD.shape), d_head_DxV, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


class Block(nn.Module):
    """Attention, then a gated MLP; each sees a normalised copy of the stream."""

    sizes: Sizes
    dtype: Any
    rows: NamedSharding | None

    @nn.compact
    def __call__(self, x_BxTxD, _):
        B, T, D = x_BxTxD.shape
        H = self.sizes.heads

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)

        h_BxTxD = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x_BxTxD)
        q_BxTxHxE, k_BxTxHxE, v_BxTxHxE = (
            dense(D, name)(h_BxTxD).reshape(B, T, H, D // H) for name in ("q", "k", "v")
        )
        y_BxTxHxE = attend(rotate(q_BxTxHxE), rotate(k_BxTxHxE), v_BxTxHxE, self.sizes.slice)
        x_BxTxD = hold(x_BxTxD + dense(D, "o")(y_BxTxHxE.reshape(B, T, D)), self.rows)

        h_BxTxD = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x_BxTxD)
        F = self.sizes.mlp
        h_BxTxF = nn.silu(dense(F, "gate")(h_BxTxD)) * dense(F, "up")(h_BxTxD)
        return hold(x_BxTxD + dense(D, "down")(h_BxTxF), self.rows), None


class Llama(nn.Module):
    """The mean cross-entropy of every token given the ones before it, in nats.

    Attributes:
      sizes: of the model.
      dtype: what is computed in; parameters are float32 and cast where they are used.
      rows: how activations lie, (rows, ...), for a compiler that chooses layouts; None where each
        device sees its own rows alone.
    """

    sizes: Sizes = Sizes()
    dtype: Any = jnp.bfloat16
    rows: NamedSharding | None = None

    @nn.compact
    def __call__(self, tokens_BxT, next_BxT):
        D, V = self.sizes.width, self.sizes.vocabulary
        x_BxTxD = hold(nn.Embed(V, D, dtype=self.dtype, name="embed")(tokens_BxT), self.rows)
        block = nn.remat(Block, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
        x_BxTxD, _ = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.sizes.layers,
        )(self.sizes, self.dtype, self.rows, name="layers")(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(dtype=self.dtype, name="norm")(x_BxTxD)

        head_DxV = self.param("head", nn.initializers.lecun_normal(), (D, V)).astype(self.dtype)
        if self.rows is not None:  # once, and not again for every slice
            head_DxV = hold(head_DxV, NamedSharding(self.rows.mesh, jax.P()))

        sum_B = cross_entropy(x_BxTxD, head_DxV, next_BxT, self.sizes.slice)
        return sum_B.mean() / tokens_BxT.shape[1]


def abstract_params(sizes: Sizes) -> Any:
    """Shapes and dtypes of the parameters; `layers` is a stack that a scan walks."""
    tokens_1xT = jax.ShapeDtypeStruct((1, sizes.sequence), jnp.int32)
    model = Llama(sizes)
    return jax.eval_shape(model.init, jax.random.key(0), tokens_1xT, tokens_1xT)["params"]


def loss_of(params, batch, sizes: Sizes, rows: NamedSharding | None = None):
    """The loss of a batch of `tokens` and `next`, each (B, T) integers."""
    return Llama(sizes, rows=rows).apply({"params": params}, batch["tokens"], batch["next"])
