"""The error after steps that were not finite names the parameters that were the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.tiers import quick
from tests.train_state.test_nonfinite import LEVELS, ROWS, mesh, params


def loss_of_some(p, b):
    """`bad` spoils the gradient of `b` alone, and in one entry, which one device stores."""
    out = b["x"] @ p["a"]
    return ((out @ p["b"]) ** 2).mean() + (p["c"] ** 2).sum() + (p["b"][12, 4] * b["bad"]).mean()


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_the_error_names_the_parameters_of_the_first_step(level, value):
    given = params() | {"c": np.ones(5, np.float32)}
    state, plan = gshard.shard_train_state(
        (given, optax.sgd(1e-3)), mesh(), level, min_shard_size=1
    )
    step = gshard.make_train_step(loss_of_some, plan, max_bad_steps=2)

    def rows(bad, x=0.01):
        return {"x": np.full((ROWS, 7), x, np.float32), "bad": np.full(ROWS, bad, np.float32)}

    state, _ = step(state, rows(0.0))
    state, _ = step(state, rows(value))
    with pytest.raises(gshard.NonFiniteError, match=r"starting at step 1 with those of b\. These"):
        for _ in range(3):
            state, _ = step(state, rows(0.0, x=np.nan))


def test_a_sum_of_squares_that_overflows_is_no_single_parameters():
    given = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
    state, plan = gshard.shard_train_state((given, optax.sgd(0.1)), mesh(), "os", min_shard_size=1)

    def loss(p, b):
        return (b["x"] * (p["a"][0] + p["b"][0])).mean()

    step = gshard.make_train_step(loss, plan, max_bad_steps=1)
    with pytest.raises(gshard.NonFiniteError, match="no single parameter"):
        for _ in range(3):
            state, _ = step(state, {"x": np.full(ROWS, 1.5e19, np.float32)})


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g"]))
def test_parameters_are_named_next_to_a_model_axis(level):
    given = params() | {"c": np.ones(5, np.float32)}
    axes = gshard.make_mesh(extra={"model": 2})
    spec = jax.sharding.NamedSharding(axes, jax.P(None, "model"))
    given["a"] = jax.device_put(np.ones((8, 16), np.float32), spec)
    given["b"] = np.ones((16, 5), np.float32)
    state, plan = gshard.shard_train_state((given, optax.sgd(1e-3)), axes, level, min_shard_size=1)

    def loss(p, b):
        return ((b["x"] @ p["a"] @ p["b"]) ** 2).mean() + (p["a"][7, 15] * b["bad"]).mean()

    rows = {"x": np.ones((16, 8), np.float32), "bad": np.zeros(16, np.float32)}
    step = gshard.make_train_step(loss, plan, max_bad_steps=1)
    state, metrics = step(state, rows)
    host = {k: jnp.asarray(np.asarray(v)) for k, v in given.items()}
    expected = optax.tree.norm(jax.grad(loss)(host, rows))
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)
    with pytest.raises(gshard.NonFiniteError, match=r"non-finite gradients: those of a\. This"):
        for _ in range(3):
            state, _ = step(state, rows | {"bad": np.full(16, np.inf, np.float32)})
