"""Hyperparameters of `optax.inject_hyperparams`, set between two steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

RATES = [0.1, 0.03, 0.2]


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(7, 6)).astype("f4"), "v": rng.normal(size=(6,)).astype("f4")}


def batch():
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(15, 7)).astype("f4"), "y": rng.normal(size=(15,)).astype("f4")}


def chained():
    return optax.chain(optax.clip(9.0), optax.inject_hyperparams(optax.adamw)(RATES[0]))


def on_one_device():
    own, state = params(), chained().init(params())
    gradient, update = jax.jit(jax.grad(loss_fn)), jax.jit(chained().update)
    for rate in RATES:
        state[1].hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(gradient(own, batch()), state, own)
        own = optax.apply_updates(own, updates)
    return own


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32])
@pytest.mark.parametrize("level", ["dp", "os", "os_g", "p_g_os"])
def test_they_are_set_between_steps_and_compile_nothing_again(level, kind):
    traced = []

    def counted(*args):
        traced.append(1)
        return loss_fn(*args)

    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((params(), chained()), mesh, level, min_shard_size=0)
    step = gshard.make_train_step(counted, plan)
    counts = []
    for i, rate in enumerate(RATES):
        if i:
            state.opt_state.hyperparams["learning_rate"] = kind(rate)
        state, _ = step(state, batch())
        counts.append(len(traced))
    assert counts[0] == counts[-1]
    assert state.opt_state.hyperparams["learning_rate"].dtype == jnp.float32
    want = on_one_device()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6),
        gshard.full_params(state),
        want,
    )


@pytest.mark.parametrize(
    ("tx", "count"),
    [
        (optax.adam(1e-3), 0),
        (optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2), 2),
    ],
)
def test_none_or_several_are_refused(tx, count):
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, _ = gshard.shard_train_state((params(), tx), mesh, "os", min_shard_size=0)
    with pytest.raises(AttributeError, match=rf"one optax.inject_hyperparams .* are {count}\."):
        _ = state.opt_state.hyperparams


@pytest.mark.parametrize("value", ["fast", None, [0.1], 1 + 2j, True])
def test_what_is_no_number_is_refused(value):
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state((params(), chained()), mesh, "os", min_shard_size=0)
    step = gshard.make_train_step(loss_fn, plan)
    state.opt_state.hyperparams["learning_rate"] = value
    few = jax.tree.map(lambda x: x[:14], batch())
    with pytest.raises(gshard.GShardError, match="learning_rate"):
        step(state, few)


def test_moments_that_the_first_update_widens():
    """In bfloat16 next to a float32 parameter: the first update makes moments float32."""
    own = params()
    own = {"a": own["v"], "w": jnp.asarray(own["w"], jnp.bfloat16)}
    tx = optax.inject_hyperparams(optax.adam)(RATES[0])
    loss = jax.jit(lambda p, b: loss_fn({"w": p["w"].astype("f4"), "v": p["a"]}, b))
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((own, tx), mesh, "p_g_os", min_shard_size=0)
    new = jax.eval_shape(plan.optimizer.init, state.params)
    step = gshard.make_train_step(loss, plan)
    one, update = tx.init(own), jax.jit(tx.update)
    for _ in range(3):
        grads = jax.grad(loss)(own, batch())
        updates, one = update(grads, one, own)
        own = optax.apply_updates(own, updates)
        state, _ = step(state, batch())
    for tree in (state.opt_state.inner, new.inner):
        assert [x.dtype for x in jax.tree.leaves(tree)] == [x.dtype for x in jax.tree.leaves(one)]
    full = gshard.full_params(state)
    np.testing.assert_allclose(full["a"], own["a"], atol=2**-7)
    np.testing.assert_allclose(full["w"].astype("f4"), own["w"].astype("f4"), atol=2**-7)
