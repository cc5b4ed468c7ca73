"""Non-finite gradients that the optimizer gets: parameters and state as on one device, NaNs too."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
DEVICES, ROWS = 3, 12
# One row of the gradient of `a` is not a number; then the loss is infinite; good steps around.
BAD = (None, "x", "y", "x", "x", None, None)


def rows(i: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(i)
    made = {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in (("x", 7), ("y", 5))}
    if BAD[i]:
        made[BAD[i]][5, 2] = np.inf
    return made


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in (("a", (7, 13)), ("b", (13, 5)))}


def loss(p: Any, b: Any) -> jax.Array:
    return ((jnp.tanh(b["x"] @ p["a"]) @ p["b"] - b["y"]) ** 2).mean()


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-2)


# Whether a step is skipped where `skip_nonfinite` is not given tells the second entry.
CHAINS = {
    "zero_nans": (lambda: optax.chain(optax.zero_nans(), optax.clip(1.0), adam()), False),
    "apply_if_finite": (lambda: optax.apply_if_finite(adam(), 2), False),
    "masked": (lambda: optax.masked(optax.apply_if_finite(adam(), 2), True), False),
    "MultiSteps": (
        lambda: optax.MultiSteps(
            adam(), 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        False,
    ),
    "MultiSteps that keeps all": (
        lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
        True,
    ),
    "clip": (lambda: optax.chain(optax.clip(1.0), adam()), True),
}


def one_device(tx: optax.GradientTransformation) -> Any:
    """Parameters and optimizer state after each step, plain JAX."""

    @jax.jit
    def step(p, s, b):
        updates, s = tx.update(jax.grad(loss)(p, b), s, p)
        return optax.apply_updates(p, updates), s

    p, s = params(), tx.init(params())
    for i in range(len(BAD)):
        p, s = step(p, s, rows(i))
        yield p, s


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)  # NaN equals NaN


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(CHAINS, LEVELS),
        [("zero_nans", "os"), ("apply_if_finite", "p_g_os"), ("clip", "os_g"), ("masked", "dp")]
        + [("MultiSteps", "os")],
    ),
)
def test_the_optimizer_gets_them_as_on_one_device(name, level):
    make, skips = CHAINS[name]
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state((params(), make()), mesh, level, min_shard_size=8)
    step = gshard.make_train_step(loss, plan, skip_nonfinite=False if skips else None)
    was_bad = False
    for i, (p, s) in enumerate(one_device(make())):
        state, metrics = step(state, rows(i))
        plain = plan.unwrap(state)
        assert_close((plain.params, plain.opt_state), (p, s))
        assert int(metrics["skipped_steps"]) == 0 and int(plain.step) == i + 1
        was_bad |= not np.isfinite(metrics["grad_norm"])
    assert was_bad


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_skipped_by_itself(name):
    make, skips = CHAINS[name]
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state((params(), make()), mesh, "os", min_shard_size=8)
    for given, wanted in ((None, skips), (True, True)):
        step = gshard.make_train_step(loss, plan, skip_nonfinite=given, donate=False)
        assert int(step(state, rows(1))[1]["skipped_steps"]) == wanted


def test_nnx_finds_it_in_the_optimizer_too():
    model = nnx.Linear(7, 5, rngs=nnx.Rngs(0))
    tx = optax.apply_if_finite(optax.adam(1e-2), 1)
    pair = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    (model, optimizer), plan = gshard.shard_train_state(pair, mesh, "p_g_os", min_shard_size=1)
    step = gshard.make_train_step(lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), plan)
    assert int(step(model, optimizer, rows(1))["skipped_steps"]) == 0
    assert int(optimizer.opt_state.inner.total_notfinite[...]) == 1
    assert np.isfinite(gshard.full_params((model, optimizer))["kernel"][...]).all()
    step(model, optimizer, rows(2))  # more than one in a row is accepted
    assert not np.isfinite(gshard.full_params((model, optimizer))["kernel"][...]).all()


def test_many_in_a_row_do_not_end_the_run():
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    tx = optax.chain(optax.zero_nans(), optax.sgd(1e-2))
    state, plan = gshard.shard_train_state((params(), tx), mesh, "os", min_shard_size=8)
    step = gshard.make_train_step(loss, plan)
    for _ in range(15):
        state, _ = step(state, rows(1))
    assert int(state.step) == 15


@pytest.mark.parametrize(
    ("tx", "options", "words"),
    [
        (adam(), {"skip_nonfinite": 1}, ("skip_nonfinite=1", "True or False")),
        (
            adam(),
            {"skip_nonfinite": False, "scaler": gshard.GradScaler()},
            ("skip_nonfinite=False", "scaler=", "Leave"),
        ),
        (
            adam(),
            {"skip_nonfinite": False, "max_bad_steps": 3},
            ("max_bad_steps=3", "gets such gradients", "skip_nonfinite=True"),
        ),
        (
            optax.apply_if_finite(adam(), 2),
            {"max_bad_steps": 3},
            ("max_bad_steps=3", "handles such gradients itself", "skip_nonfinite=True"),
        ),
    ],
)
def test_options_without_effect_are_refused(tx, options, words):
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    _, plan = gshard.shard_train_state((params(), tx), mesh, "os", min_shard_size=8)
    with pytest.raises(gshard.GShardError) as error:
        gshard.make_train_step(loss, plan, **options)
    for word in words:
        assert word in str(error.value)


def test_a_scaler_skips_whatever_the_optimizer_does():
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    tx = optax.apply_if_finite(adam(), 2)
    state, plan = gshard.shard_train_state((params(), tx), mesh, "os", min_shard_size=8)
    step = gshard.make_train_step(loss, plan, scaler=gshard.GradScaler(init_loss_scaling=8.0))
    state, metrics = step(state, rows(1))
    assert int(metrics["skipped_steps"]) == 1 and float(state.opt_state.scaler.scale) == 4


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("weights", ["of both signs", "of no example"])
def test_weights_that_add_up_to_zero(weights, micro_batches):
    """The loss is infinite, unless there is nothing to divide."""
    batch = {"x": np.ones((12, 7), np.float32), "y": np.arange(60, dtype=np.float32).reshape(12, 5)}
    sign = np.where(np.arange(12) % 2, 1, -1) * (weights == "of both signs")

    def weighted(p, b):
        errors = ((jnp.tanh(b["x"] @ p["a"]) @ p["b"] - b["y"]) ** 2).mean(1)
        return (errors * b["w"]).sum() / b["w"].sum()

    batch["w"] = sign.astype(np.float32)
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state((params(), adam()), mesh, "os_g", min_shard_size=0)
    value_and_grad = gshard.value_and_grad(weighted, plan, micro_batches=micro_batches)
    value, grads = jax.jit(value_and_grad)(state.params, gshard.shard_batch(batch, plan))
    new, metrics = gshard.make_train_step(weighted, plan, micro_batches=micro_batches)(state, batch)
    assert (metrics["skipped_steps"], new.step) == (1, 0)
    if weights == "of no example":
        assert value == metrics["loss"] == 0
        assert all(np.all(x == 0) for x in jax.tree.leaves(grads))
    else:
        assert float(value) == float(metrics["loss"]) == float(jax.jit(weighted)(params(), batch))
        assert np.isinf(value) and not np.isfinite(optax.tree.norm(grads))


def test_a_sum_of_0_with_a_weight_of_0_has_no_gradient():
    """Errors that cancel exactly, of which the gradients of the sum do not."""
    sign = np.where(np.arange(12) % 2, 1, -1).astype(np.float32)
    batch = {"y": sign[:, None], "w": sign}

    def weighted(p, b):
        errors = ((p["a"] - b["y"]) ** 2).mean(1)
        return (errors * b["w"]).sum() / b["w"].sum()

    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    start = {"a": np.zeros(7, np.float32)}
    state, plan = gshard.shard_train_state((start, adam()), mesh, "os", min_shard_size=0)
    value, grads = gshard.value_and_grad(weighted, plan)(state.params, batch)
    assert value == 0 and np.all(grads["a"] == 0)
