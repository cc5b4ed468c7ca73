"""Loops that stop for each example by itself, as `jax.vmap` makes them, and narrow integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(24, 6)).astype(np.float32),
    "n": (np.arange(24) * 7 % 11).astype(np.int32),
}
PARAMS = {"w": RNG.normal(size=(6, 4)).astype(np.float32)}


def counted(b):
    return jax.vmap(lambda n: jax.lax.fori_loop(0, n, lambda i, c: c * 0.9 + i, 1.0))(b["n"])


def halved(b):
    def one(x):
        return jax.lax.while_loop(lambda c: c[0] > 0.1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))[1]

    return jax.vmap(jax.vmap(one))(jnp.abs(b["x"])).sum(-1).astype(jnp.float32)


def mixed(b):
    """Each iteration needs the mean over all examples, so that the devices loop together."""
    start = jnp.abs(b["x"][:, 0]) + 1

    def body(c):
        new = c[0] / 2
        return new, c[1] + c[0].mean()

    def test(c):
        return c[0] > 0.3

    pair = jax.lax.while_loop(lambda c: test(c).any(), body, (start, jnp.zeros_like(start)))
    return pair[1]


def mixed_until_each_stops(b):
    def one(n):
        def body(c):
            return c[0] + 1, c[1] + jax.lax.pmean(c[1], "examples")

        return jax.lax.while_loop(lambda c: c[0] < n, body, (0, 1.0 + n))[1]

    return jax.vmap(one, axis_name="examples")(b["n"])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("loop", [counted, halved])
def test_each_device_loops_for_its_own_examples(loop, k):
    compare(loop, k)


@pytest.mark.parametrize("loop", [mixed, mixed_until_each_stops])
def test_devices_loop_together_where_an_iteration_needs_all_examples(loop):
    compare(loop, 1)


def compare(loop, k):
    def loss(p, b):
        return ((b["x"] @ p["w"]).sum(-1) * loop(b)).mean()

    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "os_g", min_shard_size=4)
    step = gshard.make_train_step(loss, plan, micro_batches=k)
    state, metrics = step(state, BATCH)
    value, grads = jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)
    np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    expected = PARAMS["w"] - 0.1 * grads["w"]
    np.testing.assert_allclose(gshard.full_params(state)["w"], expected, rtol=2e-6, atol=1e-6)
    assert bool(step.loss_transfers) is (loop not in (counted, halved))


def test_narrow_integers_keep_their_dtype_and_wrap_as_on_one_device():
    def loss(p, b):
        sums = {"a": b["n"].astype(jnp.uint8).sum(dtype=jnp.uint8) * jnp.uint8(9)}
        sums["b"] = (b["n"] * 5).astype(jnp.int8).sum(dtype=jnp.int8)
        return (b["x"] @ p["w"]).mean(), sums

    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "os", min_shard_size=4)
    _, metrics = gshard.make_train_step(loss, plan, has_aux=True)(state, BATCH)
    _, expected = loss(PARAMS, BATCH)
    for name, want in expected.items():
        assert metrics["aux"][name].dtype == want.dtype
        assert int(metrics["aux"][name]) == int(want)
