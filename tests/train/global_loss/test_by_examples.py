"""`by_examples`: a function that the rules cannot see into runs on each device's own examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

BATCH = {"x": np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)}
PARAMS = {"w": np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)}


def opaque(x, table):
    """A callback, of which no rule can know that it acts by examples; with a derivative."""

    @jax.custom_jvp
    def call(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.sort(np.asarray(x), -1), like, x)

    call.defjvp(lambda p, t: (call(*p), jnp.take_along_axis(t[0], jnp.argsort(p[0], -1), -1)))
    return call(x @ table)


def trained(loss, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "os", min_shard_size=4)
    step = gshard.make_train_step(loss, plan, donate=False, **options)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    return gshard.full_params(state)["w"], float(metrics["loss"]), step


def alone(loss):
    params = PARAMS
    for _ in range(2):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, BATCH)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params["w"], float(value)


@pytest.mark.parametrize("stated", [False, True])
def test_an_opaque_function_matches_one_device_and_gathers_only_if_nothing_is_stated(stated):
    fun = gshard.by_examples(opaque, in_axes=(0, None)) if stated else opaque

    def loss(p, b):
        return jnp.square(fun(b["x"], p["w"]) * jnp.arange(24)[:, None]).mean()

    weights, value, step = trained(loss)
    expected, right = alone(loss)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-6)
    assert value == pytest.approx(right, rel=1e-6)
    gathers = [x.line for x in step.loss_transfers if x.kind == "gather"]
    assert bool(gathers) is not stated
    assert all(f"{__file__}:" in line for line in gathers), step.loss_transfers


def test_a_gather_above_the_limit_is_refused_at_the_users_line():
    def loss(p, b):
        return jnp.square(opaque(b["x"], p["w"])).mean()

    with pytest.raises(gshard.GShardError, match=r"test_by_examples\.py:\d+.*gather_limit") as info:
        trained(loss, gather_limit=100)
    assert "gshard.by_examples" in str(info.value)


def test_outside_it_is_the_same_function_and_compiles_nothing():
    plain, calls = lambda x, y: {"sum": x["a"] + y}, []
    fun = gshard.by_examples(lambda x, y: calls.append(x) or plain(x, y), ({"a": 0}, None))
    np.testing.assert_array_equal(fun({"a": np.ones((4, 2))}, 2.0)["sum"], 3 * np.ones((4, 2)))
    assert isinstance(calls[0]["a"], jax.Array)
    assert not isinstance(calls[0]["a"], jax.core.Tracer)


def smooth(x):
    return jnp.cumsum(jnp.sin(x) * x, -1)


def scaled(x, scale):
    return smooth(x) * scale


MAPPED = gshard.by_examples(smooth)
TRANSFORMED = {
    "as it is": MAPPED,
    "derivative": jax.grad(lambda x: MAPPED(x).sum()),
    "tangents": lambda x: jax.jvp(MAPPED, (x,), (jnp.cos(x),))[1],
    "mapped": lambda x: jax.vmap(MAPPED)(x[:, None])[:, 0],
    "mapped in front": lambda x: jax.vmap(MAPPED)(jnp.stack([x, 2 * x])).sum(0),
    "mapped as often as there are examples": lambda x: jax.vmap(MAPPED, 1, 1)(
        jnp.broadcast_to(x[:, None], (24, 24, 6))
    ).mean(1),
    "mapped parameters": lambda x: jax.vmap(gshard.by_examples(scaled, (0, None)), (None, 0))(
        x, jnp.arange(3.0)
    ).mean(0),
    "second derivative": lambda x: jax.jvp(jax.grad(lambda x: MAPPED(x).sum()), (x,), (x,))[1],
    "recomputed": jax.checkpoint(MAPPED),
    "in a loop": lambda x: jax.lax.scan(lambda c, _: (MAPPED(c), None), x, None, 2)[0],
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_what_jax_makes_of_it_inside_the_loss_matches_one_device(how):
    def loss(p, b):
        return jnp.square(TRANSFORMED[how](jnp.tanh(b["x"] @ p["w"])) - b["x"]).mean()

    (weights, value, _), (expected, right) = trained(loss), alone(loss)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-6)
    assert value == pytest.approx(right, rel=1e-6)


def test_traced_values_that_it_closes_over_are_refused():
    def loss(p, b):
        return gshard.by_examples(lambda x: x @ p["w"])(b["x"]).mean()

    with pytest.raises(gshard.GShardError, match=r"closes over traced values.*in_axes=None"):
        trained(loss)


@pytest.mark.parametrize(
    ("fun", "axes", "args", "message"),
    [
        (lambda x: x.sum(), 0, (np.ones((4, 2)),), r"a result has shape \(\), and 4 examples"),
        (lambda x, y: x, 0, (np.ones((4, 2)), np.ones(3)), "one number of examples"),
        (lambda x, y: x, (0, 0), (np.ones((4, 2)), 1.0), "one number of examples"),
        (lambda x: x, 1, (np.ones((4, 2)),), "Give 0 or None for each"),
        (lambda x: x, (0, 0), (np.ones((4, 2)),), "Give 0 or None for each"),
    ],
)
def test_what_does_not_fit_is_refused(fun, axes, args, message):
    with pytest.raises(gshard.GShardError, match=message):
        gshard.by_examples(fun, axes)(*args)
