"""Rows sorted by expert against loops over tokens, on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import GShardError, expert
from tests.experts import MODELS, batch, mean_loss, params, worst

G, T, E, K, D, F = 3, 10, 4, 2, 5, 7


def given(skew: float = 0.0):
    """Tokens, their logits and one matrix for each expert; `skew` sends more to the first ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(G, T, D)).astype(np.float32)
    logits = rng.normal(size=(G, T, E)).astype(np.float32) - skew * np.arange(E, dtype=np.float32)
    return x, logits, rng.normal(size=(E, D, F)).astype(np.float32)


def product(kernel, rows, sizes):
    return jax.lax.ragged_dot(rows, kernel, sizes)


@pytest.mark.parametrize("skew", [0.0, 50.0])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_each_token_goes_to_all_of_its_experts(skew, score):
    """Also where all of them go to the same two experts, and two have no token."""
    x, logits, kernel = given(skew)
    routing = expert.route(logits, K, capacity_factor=None, score=score)
    assert (skew == 0) == (len(np.unique(routing.indices)) == E)
    found = expert.dropless(product, kernel, x, routing)
    wanted = np.zeros((G, T, F))
    for at in np.ndindex(G, T):
        for e, w in zip(routing.indices[at], routing.weights[at], strict=True):
            wanted[at] += float(w) * (x[at].astype(np.float64) @ kernel[e])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_loss_and_gradient_are_those_of_experts_that_compute_every_token():
    wanted = jax.value_and_grad(mean_loss("every token"))(params(), batch())
    found = jax.value_and_grad(mean_loss("dropless"))(params(), batch())
    assert abs(float(found[0]) - float(wanted[0])) < 2e-6
    assert worst(found[1], wanted[1]) < 2e-6


def test_a_function_sees_the_rows_of_each_expert_in_order():
    x, logits, kernel = given()
    routing, seen = expert.route(logits, K, capacity_factor=None), []

    def fun(kernel, rows, sizes):
        seen[:] = np.asarray(rows), np.asarray(sizes)
        return rows

    expert.dropless(fun, kernel, x, routing)
    rows, sizes = seen
    indices = np.asarray(routing.indices).reshape(-1)
    np.testing.assert_array_equal(sizes, np.bincount(indices, minlength=E))
    of = x.reshape(-1, D)
    wanted = [of[i // K] for e in range(E) for i in np.flatnonzero(indices == e)]
    np.testing.assert_array_equal(rows, wanted)


def test_results_have_the_dtype_of_the_function():
    x, logits, kernel = given()
    routing = expert.route(logits, K, capacity_factor=None)
    half = jnp.asarray(kernel, jnp.bfloat16)
    found = expert.dropless(product, half, jnp.asarray(x, jnp.bfloat16), routing)
    assert found.dtype == jnp.bfloat16
    exact = expert.dropless(product, kernel, x, routing)
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, atol=0.1)


def test_it_runs_under_jit_and_vmap_of_functions_that_can():
    x, logits, kernel = given()
    routing = expert.route(logits, K, capacity_factor=None)

    def dense(scale, rows, sizes):
        return rows * jnp.repeat(scale, sizes, axis=0, total_repeat_length=len(rows))

    scale = kernel[:, :, 0]
    wanted = expert.dropless(dense, scale, x, routing)
    found = jax.jit(lambda x: expert.dropless(dense, scale, x, routing))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    both = jax.vmap(lambda x: expert.dropless(dense, scale, x, routing))(np.stack([x, 2 * x]))
    np.testing.assert_allclose(both[1], 2 * wanted, rtol=1e-6)


def test_the_models_agree_where_nothing_is_dropped():
    p, h = params(), np.random.default_rng(2).normal(size=(2, 6, 16)).astype(np.float32)
    np.testing.assert_allclose(
        MODELS["dropless"](p, h), MODELS["gshard.expert"](p, h, factor=None), rtol=1e-5, atol=1e-6
    )


def test_what_cannot_be_is_refused():
    x, logits, kernel = given()
    routing = expert.route(logits, K, capacity_factor=None)
    with pytest.raises(GShardError, match=r"take 7 of the 10 tokens .* capacity_factor=None"):
        expert.dropless(product, kernel, x, expert.route(logits, K))
    with pytest.raises(GShardError, match=r"x has shape \(3, 9, 5\).*pass \(3, 10, width\)"):
        expert.dropless(product, kernel, x[:, :9], routing)
    with pytest.raises(GShardError, match=r"params\['up'\] has shape \(5, 4, 7\).* the 4 experts"):
        expert.dropless(product, {"up": kernel.swapaxes(0, 1)}, x, routing)
    with pytest.raises(GShardError, match="is not a Routing"):
        expert.dropless(product, kernel, x, logits)
    with pytest.raises(GShardError, match="has no array"):
        expert.dropless(product, {}, x, routing)
    with pytest.raises(GShardError, match=r"returned shape \(5, 60\) for rows of shape \(60, 5\)"):
        expert.dropless(lambda kernel, rows, sizes: rows.T, kernel, x, routing)
    with pytest.raises(GShardError, match="pass a function of parameters, rows and sizes first"):
        expert.dropless(kernel, kernel, x, routing)
    with pytest.raises(GShardError, match=r"fun returned a tuple.* one array \(60, width\)"):
        expert.dropless(lambda kernel, rows, sizes: (rows, sizes), kernel, x, routing)
