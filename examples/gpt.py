"""A small byte-level GPT in Flax Linen, dense or with experts. Nothing here knows about devices.

Letters in names: B examples, T bytes of each, D width, H heads, E features of a head, X experts, C
bytes that one takes of an example, F width of its MLP, V vocabulary.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import gshard

BYTES = 256  # the vocabulary

BALANCE = 0.01  # weight in the loss of how unevenly experts are used

# A block that adds nothing at the start lets the embedding learn first: fewer steps to real text.
START_AT_ZERO = nn.initializers.zeros


def rotate(x_BxTxHxE):
    """Rotary positions: turn pairs of features by an angle that grows with the position."""
    T, E = x_BxTxHxE.shape[1], x_BxTxHxE.shape[-1]
    angle_Tx1xF = jnp.arange(T)[:, None, None] * 100.0 ** -(jnp.arange(E // 2) / (E // 2))
    cos, sin = jnp.cos(angle_Tx1xF), jnp.sin(angle_Tx1xF)
    a, b = jnp.split(x_BxTxHxE, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BxTxHxE.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    heads: int

    @nn.compact
    def __call__(self, x_BxTxD):
        B, T, D = x_BxTxD.shape
        qkv_BxTx3D = nn.Dense(3 * D, use_bias=False, name="qkv")(x_BxTxD)
        q_BxTxHxE, k_BxTxHxE, v_BxTxHxE = (
            part_BxTxD.reshape(B, T, self.heads, D // self.heads)
            for part_BxTxD in jnp.split(qkv_BxTx3D, 3, axis=-1)
        )
        y_BxTxHxE = jax.nn.dot_product_attention(
            rotate(q_BxTxHxE), rotate(k_BxTxHxE), v_BxTxHxE, is_causal=True
        )
        y_BxTxD = y_BxTxHxE.reshape(B, T, D)
        return nn.Dense(D, use_bias=False, kernel_init=START_AT_ZERO, name="out")(y_BxTxD)


class Experts(nn.Module):
    """Each byte through the MLPs that a router chooses for it: together as wide as a dense one.

    The metadata names the axis of a mesh on whose devices experts stay, if it has such an axis.
    """

    experts: int
    chosen: int
    capacity: float

    @nn.compact
    def __call__(self, x_BxTxD):
        D, X = x_BxTxD.shape[-1], self.experts
        F = 4 * D // self.chosen

        def kernel(name, init, *shape):
            init = nn.with_partitioning(init, ("expert", None, None))
            return self.param(name, init, shape, jnp.float32)

        logits_BxTxX = nn.Dense(X, use_bias=False, name="router")(x_BxTxD)
        routing = gshard.expert.route(logits_BxTxX, self.chosen, capacity_factor=self.capacity)
        balance = gshard.expert.load_balancing_loss(logits_BxTxX, routing, by_group=True)
        self.sow("losses", "balance", balance)
        up_XxDxF = kernel("up", nn.initializers.lecun_normal(batch_axis=(0,)), X, D, F)
        down_XxFxD = kernel("down", START_AT_ZERO, X, F, D)
        x_XxBxCxD = gshard.expert.dispatch(x_BxTxD, routing)
        h_XxBxCxF = nn.gelu(jnp.einsum("XBCD,XDF->XBCF", x_XxBxCxD, up_XxDxF))
        return gshard.expert.combine(jnp.einsum("XBCF,XFD->XBCD", h_XxBxCxF, down_XxFxD), routing)


class Block(nn.Module):
    """Attention, then a two-layer MLP or experts; each sees a normalised copy of the stream."""

    heads: int
    experts: int = 0
    chosen: int = 2
    capacity: float = 1.25

    @nn.compact
    def __call__(self, x_BxTxD):
        D = x_BxTxD.shape[-1]
        x_BxTxD += Attention(self.heads, name="attention")(nn.LayerNorm()(x_BxTxD))
        if self.experts:
            experts = Experts(self.experts, self.chosen, self.capacity, name="experts")
            return x_BxTxD + experts(nn.LayerNorm()(x_BxTxD))
        h_BxTxF = nn.gelu(nn.Dense(4 * D, name="up")(nn.LayerNorm()(x_BxTxD)))
        return x_BxTxD + nn.Dense(D, kernel_init=START_AT_ZERO, name="down")(h_BxTxF)


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    width: int
    layers: int
    heads: int
    scan: bool = True
    remat: bool = False
    experts: int = 0
    chosen: int = 2
    capacity: float = 1.25

    @nn.compact
    def __call__(self, bytes_BxT):
        embed = nn.Embed(BYTES, self.width, embedding_init=nn.initializers.normal(1.0))
        x_BxTxD = embed(bytes_BxT)

        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        of_block = self.heads, self.experts, self.chosen, self.capacity
        if self.scan:
            # One compiled block for all layers: every kernel is a stack of `layers` kernels.
            x_BxTxD, _ = nn.scan(
                lambda layer, x_BxTxD, _: (layer(x_BxTxD), None),
                variable_axes={"params": 0, "losses": 0},
                split_rngs={"params": True},
                length=self.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(block(*of_block, name="blocks"), x_BxTxD, None)
        else:
            for i in range(self.layers):
                x_BxTxD = block(*of_block, name=f"block_{i}")(x_BxTxD)

        return nn.Dense(BYTES, use_bias=False, name="unembed")(nn.LayerNorm()(x_BxTxD))


def cross_entropy(model, params, text_BxT1):
    """Mean cross-entropy of every byte given the ones before it, in nats; and losses of blocks."""
    logits_BxTxV, sown = model.apply({"params": params}, text_BxT1[:, :-1], mutable=["losses"])
    targets_BxT = text_BxT1[:, 1:].astype(jnp.int32)
    found_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT)
    return found_BxT.mean(), jax.tree.leaves(sown)


def next_byte_loss(model, params, text_BxT1):
    """What is trained: the cross-entropy, and how unevenly experts are used."""
    loss, unevenness = cross_entropy(model, params, text_BxT1)
    return loss + BALANCE * jnp.stack(unevenness).mean() if unevenness else loss


def sample(model, params, prompt: bytes, length: int, window: int, key, temperature=0.7) -> bytes:
    """Continue `prompt` by `length` bytes; the model sees the last `window` of them."""

    @jax.jit
    def next_byte(params, text_1xT, last, key):
        logits_V = model.apply({"params": params}, text_1xT)[0, last]
        return jax.random.categorical(key, logits_V / temperature)

    text = bytearray(prompt)
    for step_key in jax.random.split(key, length):
        seen = text[-window:]
        # Padded on the right, which a causal model does not see: one shape, one compilation.
        text_1xT = jnp.asarray([list(seen + bytes(window - len(seen)))], jnp.uint8)
        text.append(int(next_byte(params, text_1xT, len(seen) - 1, step_key)))
    return bytes(text)
