"""A model of two arrays, whose sharded states and compiled steps the rows share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import gshard

EXAMPLES = 16
_random = np.random.default_rng(0)
BATCH = {
    "x": _random.normal(size=(EXAMPLES, 16)).astype(np.float32),
    "y": _random.normal(size=(EXAMPLES, 8)).astype(np.float32),
}
PARAMS = {
    "w": _random.normal(size=(16, 8)).astype(np.float32),
    "b": np.zeros(8, np.float32),
}
ADAM = optax.adam(1e-2)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]).mean()


def model_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def params(width: int = 8) -> dict[str, Any]:
    return {"w": np.tile(PARAMS["w"], (1, 2))[:, :width], "b": np.zeros(width, np.float32)}


def linen(tx: Any = ADAM, **fields: Any) -> TrainState:
    """A plain Linen state."""
    return TrainState.create(apply_fn=None, params=params(), tx=tx).replace(**fields)


def pair(tx: Any = ADAM, seed: int = 0) -> Any:
    """A plain NNX model and its optimizer."""
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def shard(state: Any = None, level: Any = "os", mesh: Any = None, **options: Any) -> Any:
    """A sharded state, by default of Linen, and its plan."""
    state = linen() if state is None else state
    mesh = gshard.make_mesh() if mesh is None else mesh
    return gshard.shard_train_state(state, mesh, level, **({"min_shard_size": 8} | options))


@functools.cache
def _kept(level: str) -> Any:
    state, plan = shard(level=level)
    return state, plan, gshard.make_train_step(loss_fn, plan)


def kept(level: str = "os") -> Any:
    """A state of its own, with the plan and the step that all rows share."""
    state, plan, step = _kept(level)
    return jax.tree.map(jnp.copy, state), plan, step


def train(batch: Any = BATCH, loss: Any = None, state: Any = None, level: str = "os", **options):
    """One step; full parameters after it and the metrics."""
    if loss is None and state is None and not options:
        state, _, step = kept(level)
    else:
        state, plan = shard(state, level)
        step = gshard.make_train_step(loss or loss_fn, plan, **options)
    state, metrics = step(state, batch)
    return gshard.full_params(state), metrics


def alone(loss: Callable[..., Any] = loss_fn, batch: Any = BATCH, steps: int = 1, tx: Any = ADAM):
    """Parameters after some steps on one device."""
    own = jax.tree.map(jnp.asarray, params())
    inner = tx.init(own)

    @jax.jit
    def step(own: Any, inner: Any) -> Any:
        updates, inner = tx.update(jax.grad(loss)(own, batch), inner, own)
        return optax.apply_updates(own, updates), inner

    for _ in range(steps):
        own, inner = step(own, inner)
    return own


def as_alone(batch: Any = BATCH, loss: Any = None, **more: Any) -> Any:
    """What a step gives, and what one device does."""
    return train(batch, loss, **more)[0], alone(loss or loss_fn, batch)


class Tensor:
    """An array of another library, as PyTorch's: its dtype is none of NumPy's."""

    dtype = object()

    def __init__(self, array: Any):
        self._array = np.asarray(array)
        self.shape = self._array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array


class Frame:
    """A table of columns, as of pandas: it has a shape, but a dtype of each column."""

    def __init__(self, array: Any):
        self._array = np.asarray(array)
        self.shape, self.dtypes = self._array.shape, ["float32"] * self._array.shape[1]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array
