"""States whose weights are exported and imported: every kind of leaf, in sizes that are padded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.reference import flat

NAMES = gshard.NameMap(  # of the weights of `linen_state` in another program
    {
        "{a}/kernel": ("{a}.t", "i o -> o i"),
        "{a}/{x:bias,scale}": "{a}.{x}",
        "batch_stats/{a}/{x}": "stats.{a}.{x}",
        "scale": "scale",
    }
)
SHARD_BYTES = 200
LEVELS = ("dp", "os", "os_g", "p_g_os")
ROWS = 24


class Net(nn.Module):
    """Widths that neither 3 nor 8 devices divide, statistics, and a scalar."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.tanh(nn.Dense(13)(x)))
        scale = self.param("scale", nn.initializers.ones, ())
        return nn.Dense(5, name="head")(x) * scale


class NNXNet(nnx.Module):
    """The same, with a list of layers and a dropout, which has keys and counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(7, 13, rngs=rngs), nnx.Linear(13, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(13, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x):
        x = self.norm(nnx.tanh(self.layers[0](x)))
        return self.layers[1](self.dropout(x))


class State(TrainState):
    batch_stats: Any = None
    key: Any = None


def linen_state(seed: int, tx: optax.GradientTransformation) -> State:
    variables = Net().init(jax.random.key(seed), np.ones((1, 7), np.float32))
    return State.create(
        apply_fn=None,
        params=_noise(variables["params"], seed),
        tx=tx,
        batch_stats=_noise(variables["batch_stats"], seed + 1),
        key=jax.random.key(seed),
    )


def nnx_state(seed: int, tx: optax.GradientTransformation) -> tuple[NNXNet, nnx.Optimizer]:
    model = NNXNet(nnx.Rngs(seed))
    rest = nnx.state(model, (nnx.Param, nnx.BatchStat))
    nnx.update(model, _noise(rest, seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def linen_loss(params, batch, *, batch_stats):
    out = Net().apply({"params": params, "batch_stats": batch_stats}, batch["x"])
    return ((out - batch["y"]) ** 2).mean()


def nnx_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


KINDS = {"linen": (linen_state, linen_loss), "nnx": (nnx_state, nnx_loss)}


def divided(
    kind: str, level: str, devices: Any, seed: int = 0, **options: Any
) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """A state on that many devices (or a mesh), its plan, and the values that went in by name."""
    make, _ = KINDS[kind]
    plain = make(seed, optax.adamw(1e-2, eps=1e-5))
    mesh = devices
    if isinstance(devices, int):
        mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state(plain, mesh, level, min_shard_size=4, **options)
    return state, plan, named(plain)


def named(state: Any) -> dict[str, np.ndarray]:
    """The weights of a plain state by their names in a file, found without gshard."""
    if isinstance(state, tuple):
        trees = [nnx.state(state[0], (nnx.Param, nnx.BatchStat))]
    else:
        trees = [state.params, {"batch_stats": state.batch_stats}]
    return {path.replace("/", "."): x for tree in trees for path, x in flat(tree).items()}


def batch(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(ROWS, 7)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :5])}


def trained(state: Any, plan: Any, kind: str, steps: int = 1) -> Any:
    """The state after some steps."""
    step = gshard.make_train_step(KINDS[kind][1], plan, donate=False)
    for i in range(steps):
        if kind == "nnx":
            step(*state, batch(i))
        else:
            state, _ = step(state, batch(i))
    return state


def _noise(tree: Any, seed: int) -> Any:
    """A tree of other values, every one different."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(0.1, 1, x.shape), x.dtype), tree)
