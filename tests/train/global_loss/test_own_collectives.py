"""Collectives that a loss calls itself: which have a meaning for the whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gshard

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(24, 6)).astype(np.float32),
    "mask": (np.arange(24) % 5 > 1).astype(np.float32),
}
PARAMS = {"w": RNG.normal(size=(6, 4)).astype(np.float32)}


def losses(p, b):
    return jnp.square(b["x"] @ p["w"]).mean(-1)


def masked(p, b):
    return (losses(p, b) * b["mask"]).sum(), b["mask"].sum()


PAIRS = {
    "pmean": (
        lambda p, b: lax.pmean(losses(p, b).mean(), "shard"),
        lambda p, b: losses(p, b).mean(),
    ),
    "quotient": (
        lambda p, b: jnp.divide(*(lax.psum(x, "shard") for x in masked(p, b))),
        lambda p, b: jnp.divide(*masked(p, b)),
    ),
    "pmax": (lambda p, b: lax.pmax(losses(p, b).max(), "shard"), lambda p, b: losses(p, b).max()),
    "count": (
        lambda p, b: lax.psum(losses(p, b).sum(), "shard") / lax.psum(counted(p, b), "shard"),
        lambda p, b: losses(p, b).sum() / counted(p, b),
    ),
    "share": (
        lambda p, b: losses(p, b).mean() * lax.pmean(counted(p, b), "shard"),
        lambda p, b: losses(p, b).mean() * counted(p, b),
    ),
}


def counted(p, b):
    """An integer."""
    return (b["x"][:, 0] > 0).sum()


def normalized(p, b):
    """`jax.vmap` turns these into reductions over positions, which nobody communicates for."""

    def one(x):
        h = x @ p["w"]
        h = h - lax.pmean(h, "examples")
        largest = lax.pmax(lax.stop_gradient(h), "examples")
        return (h / jnp.sqrt(lax.psum(h**2, "examples")) + h / largest) ** 2

    return jax.vmap(one, axis_name="examples")(b["x"]).sum(-1).mean()


PAIRS["vmap"] = (normalized, normalized)


def trained(loss, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "os_g", min_shard_size=4)
    state, metrics = gshard.make_train_step(loss, plan, **options)(state, BATCH)
    return float(metrics["loss"]), gshard.full_params(state)["w"]


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("pmean", 1),
        ("pmean", 2),
        ("quotient", 2),
        ("count", 2),
        ("share", 1),
        ("pmax", 1),
        ("vmap", 1),
    ],
)
def test_what_code_for_pmap_writes_matches_one_device(name, k):
    ours, plain = PAIRS[name]
    value, weights = trained(ours, micro_batches=k)
    expected, grads = jax.value_and_grad(plain)(PARAMS, BATCH)
    assert value == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(weights, PARAMS["w"] - 0.1 * grads["w"], atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: lax.psum(losses(p, b).sum(), "shard"),
        lambda p, b: lax.psum(losses(p, b).sum(), "shard") / 24,
        lambda p, b: losses(p, b).mean() + 0 * lax.psum(p["w"].sum(), "shard"),
    ],
)
def test_a_sum_that_would_count_the_batch_once_for_each_device_is_refused(loss):
    with pytest.raises(
        gshard.GShardError, match=r"psum at .*test_own_collectives.py:\d+ sums over"
    ):
        trained(loss)
    assert np.isfinite(trained(loss, loss_semantics="per_device")[0])
