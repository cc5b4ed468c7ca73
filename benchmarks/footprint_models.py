"""The models that taught the analytic footprint its rules: activations matter in every one.

Those of `footprint_held_out` taught it nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from benchmarks.llama import Sizes, abstract_params, loss_of
from benchmarks.models import ResidualMLP
from examples.gpt import GPT, next_byte_loss
from gshard.models import moe


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its optimizer and how many examples one device takes.

    Attributes:
      state: the train state, abstract.
      loss_fn: what `make_train_step` takes.
      batch: from a number of examples to abstract arrays.
      examples: of one device in one step.
      shard: further arguments of `shard_train_state`.
      step: further arguments of `make_train_step`.
    """

    state: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    examples: int
    shard: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> Case:
        """The same with other fields; dictionaries are merged."""
        merged = {
            name: getattr(self, name) | value if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(self, **merged)


class NormedConv(nn.Module):
    """Convolutions with BatchNorm, at four resolutions."""

    width: int = 32

    @nn.compact
    def __call__(self, x, train: bool = True):
        for i in range(4):
            for stride in (1, 2):
                x = nn.Conv(self.width << i, (3, 3), (stride, stride), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(100)(x.mean((1, 2)))


class NormedState(TrainState):
    batch_stats: Any = None


class Attending(nnx.Module):
    """A pre-norm encoder layer."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Encoder(nnx.Module):
    """Classes of sequences of vectors."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.layers = nnx.List([Attending(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, 100, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Mixer(nn.Module):
    """An MLP-Mixer over vectors: products over the positions, then over the features."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, x_BxTxD):
        x_BxTxD = nn.Dense(self.width)(x_BxTxD)
        for _ in range(self.layers):
            h_BxDxT = nn.LayerNorm()(x_BxTxD).swapaxes(1, 2)
            h_BxDxT = nn.Dense(x_BxTxD.shape[1])(nn.gelu(nn.Dense(256)(h_BxDxT)))
            x_BxTxD += h_BxDxT.swapaxes(1, 2)
            h_BxTxF = nn.silu(nn.Dense(4 * self.width)(nn.RMSNorm()(x_BxTxD)))
            x_BxTxD += nn.Dense(self.width)(h_BxTxF)
        return nn.Dense(100)(x_BxTxD.mean(1))


class Gated(nn.Module):
    """Flax's own attention and a gated MLP, in layers that are recomputed."""

    @nn.compact
    def __call__(self, x_BxTxD):
        x_BxTxD = nn.Dense(256)(x_BxTxD)
        for _ in range(3):
            x_BxTxD = nn.remat(GatedLayer)()(x_BxTxD)
        return nn.Dense(100)(x_BxTxD.mean(1))


class GatedLayer(nn.Module):
    @nn.compact
    def __call__(self, x_BxTxD):
        x_BxTxD += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x_BxTxD))
        h_BxTxD = nn.LayerNorm()(x_BxTxD)
        return x_BxTxD + nn.Dense(256)(nn.silu(nn.Dense(768)(h_BxTxD)) * nn.Dense(768)(h_BxTxD))


class Recurrent(nn.Module):
    """A GRU over a sequence of vectors: a scan over positions, and not over layers."""

    @nn.compact
    def __call__(self, x_BxTxD):
        x_BxTxD = nn.RNN(nn.GRUCell(256))(x_BxTxD)
        return nn.Dense(100)(nn.tanh(nn.Dense(512)(x_BxTxD)).mean(1))


def _linen(params: Any, tx: Any) -> Any:
    return jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None,
            params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
            tx=tx,
        )
    )


def _shape(*shape: int, dtype: Any = jnp.float32) -> Callable[[int], Any]:
    return lambda examples: jax.ShapeDtypeStruct((examples, *shape), dtype)


def _labelled(*shape: int) -> Callable[[int], Any]:
    return lambda examples: {"x": _shape(*shape)(examples), "y": _shape(dtype=jnp.int32)(examples)}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(examples: int = 1024, width: int = 256, layers: int = 4, tx: Any = None) -> Case:
    model = ResidualMLP(width, layers)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, width)))["params"]

    def loss_fn(params, x_BxD):
        return jnp.square(model.apply({"params": params}, x_BxD) - x_BxD[:, ::-1]).mean()

    return Case(_linen(params, tx or optax.adamw(1e-3)), loss_fn, _shape(width), examples)


def gpt(examples: int = 8, width: int = 256, layers: int = 4, length: int = 128, **options) -> Case:
    model = GPT(width, layers, heads=4, **options)
    text = jnp.zeros((1, length), jnp.uint8)
    params = jax.eval_shape(model.init, jax.random.key(0), text)["params"]
    shard = {"scan_axes": {"^blocks/": 0}} if model.scan else {}
    return Case(
        _linen(params, optax.adamw(1e-3)),
        partial(next_byte_loss, model),
        _shape(length + 1, dtype=jnp.uint8),
        examples,
        shard,
    )


def llama(examples: int = 4) -> Case:
    sizes = Sizes(layers=4, width=512, vocabulary=4096, sequence=512)
    shard = {"scan_axes": {"^layers/": 0}}

    def batch(examples: int) -> dict[str, Any]:
        tokens = _shape(sizes.sequence, dtype=jnp.int32)(examples)
        return {"tokens": tokens, "next": tokens}

    state = _linen(abstract_params(sizes), optax.adamw(3e-4))
    return Case(state, partial(loss_of, sizes=sizes), batch, examples, shard)


def conv(examples: int = 16) -> Case:
    model = NormedConv()
    made = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    state = jax.eval_shape(
        lambda: NormedState.create(
            apply_fn=None,
            params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["params"]),
            batch_stats=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["batch_stats"]),
            tx=optax.sgd(0.1, 0.9),
        )
    )

    def loss_fn(params, batch, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return _cross_entropy(logits, batch["y"]), {"batch_stats": new["batch_stats"]}

    return Case(state, loss_fn, _labelled(32, 32, 3), examples, step={"mutable": "batch_stats"})


def encoder(examples: int = 16) -> Case:
    def make():
        model = Encoder(128, 3, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def loss_fn(model, batch):
        return _cross_entropy(model(batch["x"]), batch["y"])

    return Case(nnx.eval_shape(make), loss_fn, _labelled(128, 64), examples)


def classified(model: nn.Module, shape: tuple[int, ...], examples: int, tx: Any) -> Case:
    """A Linen model of `x`, whose logits are compared with `y`."""
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))["params"]

    def loss_fn(params, batch):
        logits: Any = model.apply({"params": params}, batch["x"])
        return _cross_entropy(logits, batch["y"])

    return Case(_linen(params, tx), loss_fn, _labelled(*shape), examples)


def experts(examples: int = 4) -> Case:
    """A mixture of experts, whose layers are scanned and recomputed."""
    made: Any = moe.setup(
        layers=4, width=256, heads=4, kv_heads=2, mlp=512, vocabulary=4096, group=128,
        sequence=256, precision="bfloat16",
    )  # fmt: skip

    def batch(examples: int) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), made.batch
        )

    state = jax.eval_shape(made.state)
    return Case(state, made.loss_fn, batch, examples, dict(made.shard), dict(made.step))


def _bf16(case: Case) -> Case:
    return case.but(shard={"precision": "bfloat16"})


def _in_micro_batches(case: Case) -> Case:
    return case.but(step={"micro_batches": 4})


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "mlp-sgd": lambda: mlp(tx=optax.sgd(0.1)),
    "mlp-wide": lambda: mlp(examples=64, width=1024, layers=2),
    "mlp-k4": lambda: _in_micro_batches(mlp()),
    "gpt": lambda: gpt(scan=False),
    "gpt-remat": lambda: gpt(scan=False, remat=True),
    "gpt-scan": gpt,
    "gpt-scan-remat": lambda: gpt(remat=True),
    "gpt-scan-k4": lambda: _in_micro_batches(gpt()),
    "mlp-bf16": lambda: _bf16(mlp()),
    "llama": llama,
    "llama-bf16": lambda: _bf16(llama()),
    "llama-k4": lambda: _in_micro_batches(llama()),
    "conv": conv,
    "conv-k4": lambda: _in_micro_batches(conv().but(step={"loss_semantics": "per_device"})),
    "encoder": encoder,
    "mixer": lambda: classified(Mixer(256, 3), (128, 64), 16, optax.adamw(1e-3)),
    "recurrent": lambda: classified(Recurrent(), (64, 128), 64, optax.sgd(0.1, 0.9)),
    "gated": lambda: classified(Gated(), (64, 64), 32, optax.lion(1e-4)),
    "experts": experts,
}
