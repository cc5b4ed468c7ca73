"""Trees of every kind that Flax makes: normalised weights, ties, mixed dtypes, 5-D kernels."""

from __future__ import annotations

import itertools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

DEVICES, ROWS, STEPS = 3, 12, 3


class State(TrainState):
    batch_stats: Any = None


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.SpectralNorm(nn.Dense(13))(x, update_stats=train)
        return nn.Dense(5)(jnp.tanh(x))


class Weighted(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.WeightNorm(nn.Dense(13))(x)
        return nn.WeightNorm(nn.Dense(5))(jnp.tanh(x))


class Tied(nn.Module):
    """An embedding that is also the head, and one layer that is called twice."""

    @nn.compact
    def __call__(self, x, train=True):
        table, layer = nn.Embed(31, 13), nn.Dense(13)
        x = table((jnp.abs(x) * 10).astype(jnp.int32) % 31).mean(1)
        return table.attend(layer(jnp.tanh(layer(x))))[:, :5]


class Volume(nn.Module):
    """A 5-D kernel, a scalar, a leaf without elements."""

    @nn.compact
    def __call__(self, x, train=True):
        scale = self.param("scale", nn.initializers.ones, ())
        none = self.param("none", nn.initializers.ones, (0, 7))
        x = jnp.broadcast_to(x[:, :, None, None, None], (*x.shape, 2, 2, 1))
        x = nn.Conv(7, (3, 2, 2))(x * scale + none.sum())
        return nn.Dense(5)(jnp.tanh(x).mean((1, 2, 3)))


class Mixed(nn.Module):
    """Parameters in three dtypes."""

    @nn.compact
    def __call__(self, x, train=True):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            x = jnp.tanh(nn.Dense(13, param_dtype=dtype, dtype=jnp.float32)(x))
        return nn.Dense(5)(x)


MODELS = {"spectral": Spectral(), "weight": Weighted(), "tied": Tied(), "volume": Volume()}
# The mixed tree last: its half precision leaves are rounded after every step, on one device as on
# several, and a sum in another order may fall to the other side: one unit of 2^-8.
MODELS["mixed"] = Mixed()


def rows(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in (("x", 7), ("y", 5))}


def loss_of(model):
    def loss(p, b, *, batch_stats):
        variables = {"params": p, "batch_stats": batch_stats}
        out, new = model.apply(variables, b["x"], mutable=["batch_stats"])
        stats = new.get("batch_stats", batch_stats)
        return ((out - b["y"]) ** 2).mean(), {"batch_stats": stats}

    return loss


@pytest.mark.filterwarnings("ignore:parameters are float16")  # "mixed"
@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(MODELS, ["os", "os_g", "p_g_os"]),
        [("mixed", "os"), *((name, "p_g_os") for name in MODELS)],
    ),
)
def test_every_kind_of_tree_trains_as_on_one_device(name, level):
    model = MODELS[name]
    variables = model.init(jax.random.key(0), rows(0)["x"])
    stats = variables.get("batch_stats", {})
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    start = State.create(apply_fn=None, params=variables["params"], tx=tx, batch_stats=stats)
    loss = loss_of(model)

    @jax.jit
    def one_device(state, b):
        grads, new = jax.grad(lambda p: loss(p, b, batch_stats=state.batch_stats), has_aux=True)(
            state.params
        )
        return state.apply_gradients(grads=grads, **new)

    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state(start, mesh, level, min_shard_size=4)
    assert any(layout.dim is not None for layout in jax.tree.leaves(plan.grads))
    step = gshard.make_train_step(loss, plan, mutable="batch_stats")
    expected = start
    for i in range(STEPS):
        state, _ = step(state, rows(i))
        expected = one_device(expected, rows(i))
    found = plan.unwrap(state)
    for x, want in zip(
        jax.tree.leaves((found.params, found.batch_stats)),
        jax.tree.leaves((expected.params, expected.batch_stats)),
        strict=True,
    ):
        assert x.dtype == want.dtype and x.shape == want.shape
        atol = 2.0**-7 if name == "mixed" else 5e-6
        np.testing.assert_allclose(
            x.astype(np.float32), np.asarray(want, np.float32), rtol=0, atol=atol
        )
    if name == "tied" and level == "p_g_os":  # once forward, once backward, one scatter
        audit = gshard.audit(step, state, rows(0))
        gathered = sum(2 * x.stored_size for x in jax.tree.leaves(plan.params) if x.dim is not None)
        assert audit.elements("all-gather") <= gathered
        assert audit.elements("reduce-scatter") == gathered // 2


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_field_may_be_in_another_container_than_when_it_was_sharded(micro_batches):
    """A FrozenDict for a dict, and a tuple for a list, as some files bring them back."""
    start = State.create(
        apply_fn=None,
        params={"w": jnp.ones((7, 13))},
        tx=optax.sgd(0.1),
        batch_stats={"mean": [jnp.ones(7), jnp.zeros(3)]},
    )

    def loss(p, b, *, batch_stats):
        mean, other = batch_stats["mean"]
        new = flax.core.freeze({"mean": (0.9 * mean + 0.1 * b["x"].mean(0), other)})
        return (((b["x"] - mean) @ p["w"]) ** 2).mean(), {"batch_stats": new}

    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    results = []
    for moved in (False, True):
        state, plan = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)
        step = gshard.make_train_step(
            loss, plan, mutable="batch_stats", micro_batches=micro_batches
        )
        if moved:
            stats = flax.core.freeze({"mean": tuple(state.batch_stats["mean"])})
            state = state.replace(batch_stats=stats)
        for i in range(2):
            state, metrics = step(state, rows(i))
        results.append((metrics["loss"], jax.tree.leaves(state.batch_stats)))
        assert jax.tree.structure(state.batch_stats) == jax.tree.structure(
            stats if moved else start.batch_stats
        )
    jax.tree.map(np.testing.assert_array_equal, *results)
