"""Between processes on CPU no reduce-scatter is left to Gloo, whose sums may be wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util import gloo
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]


@pytest.fixture(autouse=True)
def as_between_processes(monkeypatch):
    """The programs of several processes; tests/distributed runs them over Gloo."""
    monkeypatch.setattr(gloo, "uses_gloo", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def params():
    rng = np.random.default_rng(0)
    shapes = {"a": (33, 8), "b": (33, 8), "scale": (8,)}
    return {name: rng.normal(size=shape).astype(np.float32) / 9 for name, shape in shapes.items()}


def contrastive(params, x):
    """All examples meet all others: values are gathered, and sums of them scattered."""
    pairs = jnp.tanh(x @ params["a"]) * params["scale"] @ (x @ params["b"]).T
    return optax.softmax_cross_entropy_with_integer_labels(pairs, jnp.arange(len(x))).mean()


@pytest.mark.parametrize("count", quick([2, 3, 5, 8], [3]))
@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_gradients_are_those_of_one_device_without_a_reduce_scatter(level, count):
    x = np.random.default_rng(1).normal(size=(4 * count, 33)).astype(np.float32)
    mesh = gshard.make_mesh(devices=jax.devices()[:count])
    pair = (params(), optax.adam(0.1))
    state, plan = gshard.shard_train_state(pair, mesh, level, min_shard_size=0)
    step = gshard.make_train_step(contrastive, plan)
    compiled = step.lower(state, x).compile().as_text()
    assert "reduce-scatter(" not in compiled and "all-to-all" in compiled
    assert gshard.audit(step, state, x).exceeded == ()
    value, grads = jax.jit(gshard.value_and_grad(contrastive, plan))(
        state.params, gshard.shard_batch(x, plan)
    )
    wanted = jax.jit(jax.value_and_grad(contrastive))(params(), x)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    for name, grad in wanted[1].items():
        found = np.asarray(grads[name])[: len(grad)]
        np.testing.assert_allclose(found, grad, atol=2e-6 * np.abs(grad).max())


@pytest.mark.parametrize("by", quick(["ring", "ulysses", "gather"], ["ring"]))
def test_attention_over_sequences(by):
    rng = np.random.default_rng(0)
    p = {name: rng.normal(size=(8, 16)).astype(np.float32) / 3 for name in "qkv"}
    x = rng.normal(size=(4, 16, 8)).astype(np.float32)

    def loss(p, x):
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 4, 4) for name in "qkv")
        return jnp.square(gshard.sequence.attention(q, k, v, causal=True, by=by)).mean()

    mesh = gshard.make_mesh(sequence=4)
    state, plan = gshard.shard_train_state((p, optax.sgd(1.0)), mesh, "os_g", min_shard_size=0)
    step = gshard.make_train_step(loss, plan)
    assert "reduce-scatter(" not in step.lower(state, x).compile().as_text()
    assert gshard.audit(step, state, x).exceeded == ()
    state, _ = step(state, x)
    wanted = jax.jit(jax.grad(loss))(p, x)
    for name, x in gshard.full_params(state).items():
        np.testing.assert_allclose(p[name] - x, wanted[name], atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_is_what_jax_computes(dim, monkeypatch):
    """With their derivatives; on each device an array of shape (8, 8, 8)."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(64, 8, 8)).astype(np.float32)

    def all_of(x):
        gathered = [gloo.all_gather(x, ("a", "b"), dim, tiled) for tiled in (True, False)]
        return [*gathered, gloo.reduce_scatter(x, "b", dim), gloo.all_gather(x, "a", dim)]

    def computed():
        spec = jax.P(("a", "b"))
        mapped = jax.shard_map(all_of, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        found, pull = jax.vjp(jax.jit(mapped), x)
        return found, jax.jit(pull)(jax.tree.map(jnp.cos, found))

    found = computed()
    monkeypatch.setattr(gloo, "uses_gloo", lambda: False)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(computed()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
