"""Small models for the tests: multilayer perceptron, convolutional net, GPT, in Linen and NNX.

Sizes are chosen to be awkward: 7, 13, 14, 26 and a vocabulary of 31 do not divide by most of the
device counts under test, so leaves are padded, and the 4 stacked layers of a scanned GPT divide
where its widths do not. `SEGMENT_SIZE` is small enough for the kernels, the embeddings and some of
the biases to be divided, and leaves the others whole.
Activations are smooth, so that rounding never sits on a kink of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

SEGMENT_SIZE = 24
VOCABULARY, LENGTH, LAYERS, HEADS = 31, 6, 4, 2
INPUTS, CLASSES = 7, 11


@dataclass(frozen=True)
class Model:
    """One entry of the zoo.

    Attributes:
        name: how tests call it.
        kind: `"linen"` or `"nnx"`.
        init: seed -> parameters (Linen, plain) or an NNX model.
        loss: (parameters or model, batch) -> the mean over the batch's rows, a scalar.
        batch: (seed, rows, step) -> a dict of NumPy arrays, every row different.
        scan_axes: path pattern -> dimension of the stacked layers; None where nothing is stacked
            or Flax's metadata says it.
        stacked: pattern of the paths whose dimension 0 counts layers; None without such paths.
        zero: paths of the leaves whose true gradient is zero, so that float32 finds rounding there.
    """

    name: str
    kind: str
    init: Callable[[int], Any]
    loss: Callable[[Any, Mapping[str, np.ndarray]], jax.Array]
    batch: Callable[[int, int, int], dict[str, np.ndarray]]
    scan_axes: Mapping[str, int] | None = None
    stacked: str | None = None
    zero: tuple[str, ...] = ()

    def state(self, tx: optax.GradientTransformation, seed: int = 0) -> Any:
        """A fresh `TrainState`, or for NNX a fresh `(model, optimizer)` pair."""
        params = self.init(seed)
        if self.kind == "nnx":
            return params, nnx.Optimizer(params, tx, wrt=nnx.Param)
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def target(self, state: Any) -> Any:
        """What the loss takes, of a state: parameters, or the NNX model."""
        return state[0] if self.kind == "nnx" else state.params

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `gshard.shard_train_state`."""
        return {"min_shard_size": SEGMENT_SIZE} | (
            {"scan_axes": self.scan_axes} if self.scan_axes else {}
        )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all leading dimensions; float32 or wider."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Batches


def feature_rows(seed: int, rows: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, step))
    x = rng.normal(size=(rows, INPUTS)).astype(np.float32)
    return {"x": x, "y": _classes_of(x)}


def image_rows(seed: int, rows: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, step))
    shades = rng.normal(size=(rows, 1, 1, 3))
    x = (shades + rng.normal(size=(rows, 5, 5, 3))).astype(np.float32)
    return {"x": x, "y": _classes_of(x.mean((1, 2)))}


def token_rows(seed: int, rows: int, step: int) -> dict[str, np.ndarray]:
    """Half of the tokens follow from the one before, a quarter from the one before that."""
    rng = np.random.default_rng((seed, step))
    tokens = rng.integers(0, VOCABULARY, (rows, LENGTH + 1))
    source = rng.choice(3, (rows, LENGTH + 1), p=[0.5, 0.25, 0.25])
    for i in range(2, LENGTH + 1):
        choices = [3 * tokens[:, i - 1] + 1, 5 * tokens[:, i - 2] + 2, tokens[:, i]]
        tokens[:, i] = np.choose(source[:, i], choices) % VOCABULARY
    return {"tokens": tokens.astype(np.int32)}


def _classes_of(x: np.ndarray) -> np.ndarray:
    """Labels that follow from the features: gradients then do not average out over the rows."""
    return (np.abs(x[:, :3]).sum(1) * 3).astype(np.int32) % CLASSES


# Multilayer perceptron: hidden widths 13 and 24, a scalar and a vector that are replicated


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(13)(x))
        x = nn.tanh(nn.Dense(24)(x))
        x = nn.LayerNorm()(x)
        temperature = self.param("temperature", nn.initializers.ones, ())
        return nn.Dense(CLASSES)(x) * temperature


class NNXMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(INPUTS, 13, rngs=rngs)
        self.second = nnx.Linear(13, 24, rngs=rngs)
        self.norm = nnx.LayerNorm(24, rngs=rngs)
        self.head = nnx.Linear(24, CLASSES, rngs=rngs)
        self.temperature = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        x = nnx.tanh(self.first(x))
        x = self.norm(nnx.tanh(self.second(x)))
        return self.head(x) * self.temperature[...]


# Convolutional net


class LinenConv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x)))
        x = nn.silu(nn.Conv(13, (3, 3), strides=(2, 2))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class NNXConv(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.second = nnx.Conv(8, 13, (3, 3), strides=(2, 2), rngs=rngs)
        self.head = nnx.Linear(13, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.norm(self.first(x)))
        return self.head(nnx.silu(self.second(x)).mean((1, 2)))


# GPT: widths (embedding, feed forward) and how its layers are run

PLAIN = (16, 24)  # divides by 2, 4 and 8
ODD = (14, 26)  # divides by 2 only, so at 4 devices the stacked layers are the tempting dimension

# narrow: peaked attention makes rounding grow from step to step, on one device as on many
NARROW = nn.initializers.variance_scaling(0.5, "fan_in", "truncated_normal")


def causal() -> np.ndarray:
    return np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))


class LinenBlock(nn.Module):
    hidden: int
    boxed: bool = False

    @nn.compact
    def __call__(self, x, _):
        def box(init, rank):
            return nn.with_partitioning(init, (None,) * rank) if self.boxed else init

        def dense(features):
            return nn.Dense(features, kernel_init=box(lecun, 2), bias_init=box(zeros, 1))

        def norm():
            return nn.LayerNorm(scale_init=box(ones, 1), bias_init=box(zeros, 1))

        lecun, zeros, ones = (
            nn.initializers.lecun_normal(),
            nn.initializers.zeros,
            nn.initializers.ones,
        )
        width = x.shape[-1]
        h = norm()(x)
        attend = nn.MultiHeadDotProductAttention(
            HEADS, kernel_init=box(NARROW, 2), bias_init=box(zeros, 1), name="attention"
        )
        x = x + attend(h, mask=causal())
        h = nn.gelu(dense(self.hidden)(norm()(x)))
        return x + dense(width)(h), None


class LinenGPT(nn.Module):
    width: int = PLAIN[0]
    hidden: int = PLAIN[1]
    scan: bool = False
    remat: bool = False
    tied: bool = False
    boxed: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, self.width, name="embed")
        position = self.param("position", nn.initializers.normal(0.1), (LENGTH, self.width))
        x = embed(tokens) + position
        block = nn.remat(LinenBlock, prevent_cse=not self.scan) if self.remat else LinenBlock
        if self.scan:
            metadata = {nn.PARTITION_NAME: "layers"} if self.boxed else {}
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params=metadata,
            )
            x, _ = layers(self.hidden, self.boxed, name="layers")(x, None)
        else:
            for i in range(LAYERS // 2):
                x, _ = block(self.hidden, name=f"block_{i}")(x, None)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY, name="head")(x)


def attend(query, key, value, *, mask, **_):
    """Over (row, token, head, dim); flax.nnx's own takes its softmax in float32 always."""
    scores = jnp.einsum("rqhd,rkhd->rhqk", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("rhqk,rkhd->rqhd", weights, value)


class NNXBlock(nnx.Module):
    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, width, kernel_init=NARROW, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=causal())
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NNXGPT(nnx.Module):
    def __init__(
        self, rngs: nnx.Rngs, width: int, hidden: int, scan=False, remat=False, tied=False
    ):
        self.scan, self.remat, self.tied = scan, remat, tied
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LENGTH, width)))
        if scan:

            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stack(rngs):
                return NNXBlock(width, hidden, rngs)

            self.layers = stack(rngs)
        else:
            self.layers = nnx.List([NNXBlock(width, hidden, rngs) for _ in range(LAYERS // 2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        def run(x, block):
            return block(x)

        if self.remat:
            run = nnx.remat(run)
        x = self.embed(tokens) + self.position[...]
        if self.scan:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for block in self.layers:
                x = run(x, block)
        x = self.norm(x)
        return self.embed.attend(x) if self.tied else self.head(x)


# The table


def _linen(name, module, batch, labels, **more) -> Model:
    made = jax.jit(module.init)  # one program, instead of dozens of operations compiled one by one

    def init(seed):
        return made(jax.random.key(seed), _inputs(batch(0, 1, 0)))["params"]

    def loss(params, rows):
        return cross_entropy(module.apply({"params": params}, _inputs(rows)), labels(rows))

    return Model(name, "linen", init, loss, batch, **more)


def _nnx(name, make, batch, labels, **more) -> Model:
    def loss(model, rows):
        return cross_entropy(model(_inputs(rows)), labels(rows))

    return Model(name, "nnx", lambda seed: make(nnx.Rngs(seed)), loss, batch, **more)


def _inputs(rows):
    return rows["tokens"][:, :-1] if "tokens" in rows else rows["x"]


def _classes(rows):
    return rows["y"]


def _next_tokens(rows):
    return rows["tokens"][:, 1:]


def _linen_gpt(name, scan_axes=None, **options) -> Model:
    more = _layers("block_{}", options) | {"scan_axes": scan_axes}
    return _linen(name, LinenGPT(**options), token_rows, _next_tokens, **more)


def _nnx_gpt(name, widths=PLAIN, scan_axes=None, **options) -> Model:
    def make(rngs):
        return NNXGPT(rngs, *widths, **options)

    more = _layers("layers/{}", options) | {"scan_axes": scan_axes}
    return _nnx(name, make, token_rows, _next_tokens, **more)


def _layers(unrolled: str, options: dict[str, Any]) -> dict[str, Any]:
    """What follows from where the layers are: stacked paths, and the paths of attention key biases.

    A key bias shifts all scores of a query alike, and the softmax does not see it.
    """
    scan = options.get("scan", False)
    blocks = ["layers"] if scan else [unrolled.format(i) for i in range(LAYERS // 2)]
    zero = tuple(f"{block}/attention/key/bias" for block in blocks)
    return {"stacked": "^layers/" if scan else None, "zero": zero}


def _odd() -> dict[str, int]:
    return {"width": ODD[0], "hidden": ODD[1]}


_AXES: dict[str, Any] = {"scan_axes": {"^layers/": 0}}

ZOO: dict[str, Model] = {
    model.name: model
    for model in (
        _linen("linen_mlp", LinenMLP(), feature_rows, _classes),
        _nnx("nnx_mlp", NNXMLP, feature_rows, _classes),
        _linen("linen_conv", LinenConv(), image_rows, _classes),
        _nnx("nnx_conv", NNXConv, image_rows, _classes),
        _linen_gpt("linen_gpt"),
        _linen_gpt("linen_gpt_remat", remat=True),
        _linen_gpt("linen_gpt_tied", tied=True, **_odd()),
        _linen_gpt("linen_gpt_scan", scan=True, **_odd(), **_AXES),
        _linen_gpt("linen_gpt_scan_remat", scan=True, remat=True, **_AXES),
        _linen_gpt("linen_gpt_scan_boxed", scan=True, boxed=True, **_odd()),
        _nnx_gpt("nnx_gpt"),
        _nnx_gpt("nnx_gpt_remat", remat=True),
        _nnx_gpt("nnx_gpt_tied", tied=True, widths=ODD),
        _nnx_gpt("nnx_gpt_scan", scan=True, widths=ODD, **_AXES),
        _nnx_gpt("nnx_gpt_scan_remat", scan=True, remat=True, **_AXES),
    )
}
