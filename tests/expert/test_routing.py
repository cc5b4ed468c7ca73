"""Routing, dispatch and balance against loops over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import GShardError, GShardWarning, expert
from gshard.expert.balance import load
from tests.experts import MODELS, batch, params

G, T, E, K, D = 3, 10, 4, 2, 5


def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(G, T, E)).astype(np.float32)


def by_loop(x, scores, k, capacity):
    """What each expert gets, what comes back if it returns that, and what is dropped."""
    groups, tokens, experts = scores.shape
    slots = np.zeros((experts, groups, capacity, x.shape[-1]), np.float32)
    back, dropped = np.zeros_like(x), 0
    for g in range(groups):
        used = [0] * experts
        for t in range(tokens):
            best = np.argsort(-scores[g, t], kind="stable")[:k]
            weights = scores[g, t, best] / scores[g, t, best].sum()
            for e, w in zip(best, weights, strict=True):
                if used[e] < capacity:
                    slots[e, g, used[e]] = x[g, t]
                    back[g, t] += w * x[g, t]
                else:
                    dropped += 1
                used[e] += 1
    return slots, back, dropped / (groups * tokens * k)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, None])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_tokens_go_where_a_loop_sends_them(factor, score):
    given = logits()
    x = np.random.default_rng(1).normal(size=(G, T, D)).astype(np.float32)
    routing = expert.route(given, K, capacity_factor=factor, score=score)
    capacity = T if factor is None else min(T, int(np.ceil(T * K / E * factor)))
    scores = np.asarray(jax.nn.softmax(given) if score == "softmax" else jax.nn.sigmoid(given))
    slots, back, dropped = by_loop(x, scores, K, capacity)
    sent = expert.dispatch(x, routing)
    np.testing.assert_array_equal(sent, slots)
    np.testing.assert_allclose(expert.combine(sent, routing), back, rtol=1e-5, atol=1e-6)
    assert float(expert.dropped(routing)) == pytest.approx(dropped)
    assert (factor == 0.5) <= (dropped > 0)


def test_a_capacity_factor_may_be_a_number_of_numpy():
    assert expert.route(logits(), K, capacity_factor=np.float32(1.5)).capacity == 8
    assert expert.route(logits(), K, capacity_factor=np.int64(1)).capacity == 5
    given = np.zeros((1, 100, 10), np.float32)
    assert expert.route(given, 1, capacity_factor=np.float32(1.1)).capacity == 11


def test_a_capacity_that_always_drops_more_than_half_is_warned_of():
    with pytest.warns(GShardWarning, match="capacity_factor=0.2 drops at least 80% of the"):
        routing = expert.route(np.zeros((1, 20, 2)), 2, capacity_factor=0.2)
    assert float(expert.dropped(routing)) >= 0.8


def test_later_tokens_and_other_groups_change_nothing():
    given, x = logits(), np.random.default_rng(1).normal(size=(G, T, D)).astype(np.float32)
    changed, other = given.copy(), x.copy()
    changed[:, 6:] = -changed[:, 6:]
    changed[1:] = 0
    other[:, 6:] = 7

    def out(x, given):
        routing = expert.route(given, K, capacity_factor=0.5)
        return expert.combine(expert.dispatch(x, routing), routing)

    np.testing.assert_array_equal(out(x, given)[0, :6], out(other, changed)[0, :6])


def test_the_gradient_is_that_of_one_hot_products():
    p, h = params(), jnp.tanh(params()["embed"][batch()["x"]])

    def of(name, **options):
        return jax.grad(lambda p, h: jnp.square(MODELS[name](p, h, **options)).sum(), (0, 1))(p, h)

    found, wanted = of("gshard.expert", factor=1.0), of("one-hot", capacity=2)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_a_bias_changes_the_choice_and_not_the_weights():
    given = logits()
    bias = jnp.array([0.0, 0.0, 0.0, 5.0])
    routing = expert.route(given, K, bias=bias)
    assert bool((routing.indices == 3).any(-1).all())
    weights = np.take_along_axis(np.asarray(jax.nn.softmax(given)), np.asarray(routing.indices), -1)
    np.testing.assert_allclose(routing.weights, weights / weights.sum(-1, keepdims=True), rtol=1e-5)
    raw = expert.route(given, K, bias=bias, normalize=False)
    np.testing.assert_allclose(raw.weights, weights, rtol=1e-5)


def test_bfloat16_tokens_stay_so_and_the_router_is_float32():
    routing = expert.route(jnp.asarray(logits(), jnp.bfloat16), K)
    sent = expert.dispatch(jnp.ones((G, T, D), jnp.bfloat16), routing)
    assert routing.weights.dtype == jnp.float32
    assert sent.dtype == expert.combine(sent, routing).dtype == jnp.bfloat16


def test_balance_is_one_if_even_and_the_number_of_experts_if_not():
    even = jnp.zeros((G, T, E))
    assert float(expert.load_balancing_loss(even, expert.route(even, E))) == pytest.approx(1)
    one = jnp.zeros((G, T, E)).at[..., 2].set(50.0)
    assert float(expert.load_balancing_loss(one, expert.route(one, 1))) == pytest.approx(E)
    given = logits()
    routing = expert.route(given, K)
    used = np.asarray(load(routing)) / (G * T * K)
    wanted = E * (used * np.asarray(jax.nn.softmax(given)).mean((0, 1))).sum()
    assert float(expert.load_balancing_loss(given, routing)) == pytest.approx(wanted, rel=1e-6)
    single = [
        float(expert.load_balancing_loss(given[g : g + 1], expert.route(given[g : g + 1], K)))
        for g in range(G)
    ]
    found = expert.load_balancing_loss(given, routing, by_group=True)
    assert float(found) == pytest.approx(np.mean(single), rel=1e-6)


def test_the_bias_moves_against_the_load_and_evens_it_out():
    np.testing.assert_allclose(
        expert.update_bias(jnp.zeros(3), jnp.array([4.0, 1.0, 1.0]), rate=0.5), [-0.5, 0.5, 0.5]
    )
    given = logits() + np.array([1.5, 0.0, 0.0, 0.0], np.float32)
    bias = jnp.zeros(E)
    before = load(expert.route(given, 1))
    for _ in range(200):
        bias = expert.update_bias(bias, load(expert.route(given, 1, bias=bias)), rate=0.01)
    after = load(expert.route(given, 1, bias=bias))
    assert float(after.max()) < 0.6 * float(before.max()) and float(after.sum()) == G * T


def test_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials():
    given = logits()
    wanted = np.square(np.log(np.exp(given).sum(-1))).mean()
    assert float(expert.z_loss(given)) == pytest.approx(wanted, rel=1e-5)


ROUTING = expert.route(np.zeros((2, 8, 4), np.float32), 2)
WRONG = {
    "logits of one group": (lambda: expert.route(np.zeros((8, 4)), 2), r"\(8, 4\).*logits\[N"),
    "k": (lambda: expert.route(np.zeros((1, 8, 4)), 5), "k=5 is more than the 4 experts"),
    "k is 0": (lambda: expert.route(np.zeros((1, 8, 4)), 0), "k=0 must be"),
    "factor": (
        lambda: expert.route(np.zeros((1, 8, 4)), 1, capacity_factor=0), "capacity_factor=0 must",
    ),
    "score": (
        lambda: expert.route(np.zeros((1, 8, 4)), 1, score="sigmod"), "Did you mean 'sigmoid'",
    ),
    "bias": (
        lambda: expert.route(np.zeros((1, 8, 4)), 1, bias=np.zeros(3)), r"\(3,\), not \(4,\)",
    ),
    "tokens": (lambda: expert.dispatch(np.zeros((2, 7, 3)), ROUTING), r"pass \(2, 8, width\)"),
    "slots": (lambda: expert.combine(np.zeros((4, 2, 4, 3)), ROUTING), r"dispatch gave \(4, 2, 5"),
    "other logits": (
        lambda: expert.load_balancing_loss(np.zeros((2, 8, 5)), ROUTING), "pass the logits that",
    ),
    "no routing": (
        lambda: expert.dispatch(np.zeros((2, 8, 3)), np.zeros((2, 8, 4))), "is not a Routing: pass",
    ),
    "no routing to combine": (
        lambda: expert.combine(np.zeros((4, 2, 5, 3)), None), "None is not a Routing",
    ),
    "no routing to count": (lambda: expert.load(np.zeros((2, 8, 4))), "is not a Routing"),
    "no routing of drops": (lambda: expert.dropped(np.zeros((2, 8, 4))), "is not a Routing"),
    "turned round": (
        lambda: expert.load_balancing_loss(ROUTING, np.zeros((2, 8, 4))), "is not a Routing",
    ),
    "a bias of integers": (
        lambda: expert.update_bias(np.zeros(4, int), np.zeros(4)), "bias has dtype int",
    ),
    "bias and load": (lambda: expert.update_bias(np.zeros(3), np.zeros(4)), "one entry per expert"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    call, message = WRONG[case]
    with pytest.raises(GShardError, match=message):
        call()


def test_a_dropped_assignment_reads_no_other_tokens_place():
    given = np.tile(np.array([[[4.0, 0.0]]], np.float32), (1, 4, 1))  # all choose the first expert
    routing = expert.route(given, 1, capacity_factor=1.0)
    y = np.zeros((2, 1, routing.capacity, D), np.float32)
    y[1] = np.inf  # what an expert without tokens may give
    y[0, 0, -1] = np.nan
    back = np.asarray(expert.combine(y, routing))
    taken = np.asarray(routing.taken)[0, :, 0]
    assert not taken.all() and np.all(back[0, ~taken] == 0)


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "places"),
    [(1000, 10, 1.1, 110), (10_000, 100, 1.1, 110), (7, 2, 1.0, 4)],
)
def test_places_are_counted_without_rounding(tokens, experts, factor, places):
    given = np.zeros((1, tokens, experts), np.float32)
    assert expert.route(given, 1, capacity_factor=factor).capacity == places


def test_the_router_of_one_expert_for_each_token_trains():
    logits = jax.random.normal(jax.random.key(0), (1, 8, 4))
    of_tokens = jnp.arange(8.0)[None, :, None]
    gradient = jax.grad(lambda x: (expert.route(x, 1).weights * of_tokens).sum())(logits)
    assert jnp.abs(gradient).max() > 1e-3
    np.testing.assert_array_equal(expert.route(logits, 1, normalize=True).weights, 1)


def test_the_choice_of_experts_is_saved_with_the_rows_that_are_sent_by_it():
    """Computed again in a backward pass, a near tie might go to another expert."""
    program = str(jax.make_jaxpr(lambda x: expert.route(x, K).indices)(logits()))
    assert program.count("name=expert_exchange") == 1
