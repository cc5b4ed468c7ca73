"""With `jax_enable_x64`, losses, gradients and norms of float64 are exact to float64's rounding."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

DEVICES = 3  # 1 / 3 is not exact in float32
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(12, 8)), "b": RNG.normal(size=8)}
BATCH = {
    "x": RNG.normal(size=(12, 12)),
    "y": RNG.normal(size=(12, 8)),
    "mask": RNG.random((12, 8)) > 0.3,
}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def errors(params, batch):
    return jnp.square(jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"])


def masked(params, batch):
    return errors(params, batch).sum(where=batch["mask"]) / batch["mask"].sum()


def root(params, batch):
    """Not a sum over examples: each device computes it, and a share of it counts."""
    return jnp.sqrt(errors(params, batch).mean())


def large(params, batch):
    """Its squares are beyond float32."""
    return 1e30 * masked(params, batch)


def weighted(params, batch):
    return gshard.Weighted(errors(params, batch).sum(where=batch["mask"]), batch["mask"].sum())


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (masked, {"micro_batches": 2}),
        (root, {}),
        (large, {}),
        (weighted, {"loss_semantics": "per_device"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_step_is_that_of_one_device(loss, options):
    def alone(params, batch):
        out = loss(params, batch)
        return out.sum / out.weight if isinstance(out, gshard.Weighted) else out

    value, grads = jax.jit(jax.value_and_grad(alone))(PARAMS, BATCH)
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    pair = (PARAMS, optax.sgd(1.0))
    state, plan = gshard.shard_train_state(pair, mesh, "zero3", min_shard_size=0)
    state, metrics = gshard.make_train_step(loss, plan, **options)(state, BATCH)
    found = gshard.full_params(state)
    for name, g in grads.items():
        largest = np.abs(g).max()
        np.testing.assert_allclose(found[name], PARAMS[name] - g, rtol=0, atol=1e-14 * largest)
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == np.float64
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-14)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-14)
    assert metrics["skipped_steps"] == 0


def test_gradients_of_several_calls_are_those_of_one_device():
    value, grads = jax.value_and_grad(root)(PARAMS, BATCH)
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    pair = (PARAMS, optax.sgd(1.0))
    state, plan = gshard.shard_train_state(pair, mesh, "zero2", min_shard_size=0)
    batch = gshard.shard_batch(BATCH, plan)
    loss, local = gshard.value_and_grad(root, plan, sync=False)(state.params, batch)
    reduced_loss, found = gshard.reduce_gradients(local, plan)
    np.testing.assert_allclose(reduced_loss, value, rtol=1e-14)
    for name, g in grads.items():
        np.testing.assert_allclose(found[name][: len(g)], g, rtol=0, atol=1e-14 * np.abs(g).max())


def test_an_evaluation_is_that_of_one_device():
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state(
        (PARAMS, optax.sgd(1.0)), mesh, "zero3", min_shard_size=0
    )
    found = gshard.make_eval_step(masked, plan)(state, BATCH)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, masked(PARAMS, BATCH), rtol=1e-14)
