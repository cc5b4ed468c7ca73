"""Parameters that their gradient replaces: the statistics of Flax's fp8 layers."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

LEVELS = ("dp", "os", "os_g", "p_g_os")
KEY = "_overwrite_with_gradient"
STEPS, ROWS = 4, 24


def fp8(*args: Any, **options: Any) -> nn.Fp8DirectDotGeneralOp:
    return nn.Fp8DirectDotGeneralOp(*args, amax_history_length=3, **options)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(13, dot_general_cls=fp8)(x))
        return nn.Dense(5)(nn.Dense(16, dot_general_cls=fp8, use_bias=False)(x))


@functools.cache
def batch(i: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Every row has another size, so that every device and micro-batch sees another largest."""
    rng = np.random.default_rng(i)
    size = rng.permutation(np.geomspace(0.5, 8, rows))[:, None]
    shapes = {"x": (rows, 7), "y": (rows, 5)}
    found = {k: (size * rng.normal(size=s)).astype(np.float32) for k, s in shapes.items()}
    return {**found, "mask": (rng.random(rows) < 0.7).astype(np.float32)}


@functools.cache
def initial():
    return jax.jit(Net().init)(jax.random.key(0), batch(0)["x"])


def mean_loss(variables: Any, b: Any) -> jax.Array:
    return jnp.square(Net().apply(variables, b["x"]) - b["y"]).mean()


def sums(variables: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    losses = jnp.square(Net().apply(variables, b["x"]) - b["y"]).sum(-1)
    return (losses * b["mask"]).sum(), b["mask"].sum()


def weighted_loss(variables: Any, b: Any) -> gshard.Weighted:
    return gshard.Weighted(*sums(variables, b))


def weighted_on_one(variables: Any, b: Any) -> jax.Array:
    total, weight = sums(variables, b)
    return total / weight


LOSSES = {"mean": (mean_loss, mean_loss), "weighted": (weighted_loss, weighted_on_one)}


def fresh() -> TrainState:
    return TrainState.create(apply_fn=None, params=initial(), tx=optax.adam(1e-2))


@functools.cache
def expected(name: str = "mean") -> dict[str, np.ndarray]:
    """Flax's own train state on one device."""

    @jax.jit
    def step(state: Any, b: Any) -> Any:
        return state.apply_gradients(grads=jax.grad(LOSSES[name][1])(state.params, b))

    state = fresh()
    for i in range(STEPS):
        state = step(state, batch(i))
    return flat(state.params)


def flat(params: Any) -> dict[str, np.ndarray]:
    return traverse_util.flatten_dict(jax.device_get(params), sep="/")


def assert_same(found: Any, wanted: dict[str, np.ndarray]) -> None:
    """float32 sums in another order, in units of the leaf's largest entry.

    What is fp8 rounds alike wherever a row lies: a statistic that is off would move a parameter by
    percents.
    """
    found = flat(found)
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        error = np.abs(found[path] - x).max()
        assert error <= 1e-6 * np.abs(x).max(), f"{path}: {error:.2g}"


def divided(level: str, devices: int = 4, replica: int = 1, **options: Any) -> Any:
    mesh = gshard.make_mesh(devices=jax.devices()[:devices], replica=replica)
    return gshard.shard_train_state(fresh(), mesh, level, min_shard_size=16, **options)


QUICK = [("p_g_os", "weighted", 2, 4, 1)]
SLOW = [
    (level, name, k, devices, replica)
    for level in LEVELS
    for name in LOSSES
    for k in (1, 2)
    for devices, replica in ((3, 1), (4, 1), (4, 2))
]


@pytest.mark.parametrize(
    ("level", "name", "k", "devices", "replica"),
    [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK]],
)
def test_statistics_are_those_of_flax_on_one_device(level, name, k, devices, replica):
    """By `make_train_step` and in the user's own loop, in one program; and a skipped step."""
    state, plan = divided(level, devices, replica)
    step = gshard.make_train_step(LOSSES[name][0], plan, micro_batches=k, donate=False)
    gradient = gshard.value_and_grad(LOSSES[name][0], plan, micro_batches=k)

    @jax.jit
    def both(theirs: Any, mine: Any, b: Any) -> Any:
        theirs, metrics = step(theirs, b)
        b = {**b, "y": b["y"] + 0 * metrics["grad_norm"]}  # one after the other
        _, grads = gradient(mine.params, b)
        return theirs, mine.apply_gradients(grads=grads)

    theirs = mine = state
    for i in range(STEPS):
        theirs, mine = both(theirs, mine, batch(i))
    bad = {**batch(0), "y": batch(0)["y"].copy()}
    bad["y"][5, 2] = np.inf
    kept, _ = both(theirs, mine, bad)
    for path, x in flat(kept.params).items():  # a step that is not finite changes nothing
        np.testing.assert_array_equal(x, flat(theirs.params)[path], err_msg=path)
    assert both._cache_size() == 1
    for trained in (theirs, mine):
        assert_same(gshard.full_params(trained), expected(name))
        assert all(x.is_fully_replicated for x in jax.tree.leaves(trained.params[KEY]))
    kernel = theirs.params["params"]["Dense_0"]["kernel"]
    assert kernel.is_fully_replicated == (level != "p_g_os")


def test_the_statistics_differ_by_device():
    """Else any reduction would do; and they reach the parameters."""

    # `initial` keeps what it returns, so its first call must not be inside a jitted function.
    variables = initial()
    gradient = jax.jit(lambda b: jax.grad(mean_loss)(variables, b)[KEY])
    first, second = [flat(gradient({k: x[i::2] for k, x in batch(0).items()})) for i in (0, 1)]
    for path, x in first.items():
        same = "kernel" in path or "scale" in path
        assert np.array_equal(x, second[path]) == same, path
    start = flat(initial())
    for path, x in expected().items():
        assert np.abs(x - start[path]).max() > 0, path


def test_they_are_replicated_without_optimizer_state():
    state, plan = divided("p_g_os", frozen="Dense_0/bias")
    paths = [str(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]]
    assert paths and not [path for path in paths if "Fp8" in path]
    assert "Fp8" not in str([x.path for x in jax.tree.leaves(plan.grads)])
    whole = [x for x in jax.tree.leaves(plan.non_trainable) if x.path.startswith(KEY)]
    assert len(whole) == 12 and all(x.dim is None for x in whole)
    # The plain state back, and a state that is no Flax TrainState yet.
    plain = plan.unwrap(state)
    assert_same(plain.params, flat(initial()))
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    pair, _ = gshard.shard_train_state((initial(), optax.adam(1e-2)), mesh, "os", min_shard_size=16)
    assert_same(gshard.full_params(pair), flat(initial()))


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_what_moves_is_what_is_promised(level, k):
    """The weight is summed before any gradient is taken, and that gathers nothing."""
    state, plan = divided(level)
    step = gshard.make_train_step(weighted_loss, plan, micro_batches=k, donate=False)
    found = gshard.audit(step, state, batch(0))
    agreed = sum(row.elements or 0 for row in found.collectives if row.purpose == "agree")
    # The largest of each, and whether it is a number on every device.
    assert agreed == 2 * sum(x.size for x in jax.tree.leaves(initial()[KEY]))
    # The audit counts scalars apart, such as the loss's own maxima.
    scalars = sum(row.elements for row in step.budget.communicated if row.purpose == "loss")
    assert found.elements("all-reduce") == step.budget.elements("all-reduce") - scalars + agreed
    assert found.elements("reduce-scatter") == step.budget.elements("reduce-scatter")
    assert found.elements("all-gather") <= step.budget.elements("all-gather")


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_under_a_scaler_they_are_those_of_one_device_that_scales(level):
    state, plan = divided(level)
    scaler = gshard.GradScaler(init_loss_scaling=64.0)
    step = gshard.make_train_step(mean_loss, plan, scaler=scaler, micro_batches=2)

    @jax.jit
    def alone(state: Any, b: Any) -> Any:
        grads = jax.grad(lambda p: 64 * mean_loss(p, b))(state.params)
        grads["params"] = jax.tree.map(lambda g: g / 64, grads["params"])
        return state.apply_gradients(grads=grads)

    plain = fresh()
    for i in range(STEPS):
        state, plain = step(state, batch(i))[0], alone(plain, batch(i))
    assert_same(gshard.full_params(state), flat(plain.params))


@pytest.mark.slow
def test_evaluation_and_mixed_precision():
    state, plan = divided("p_g_os", precision="bfloat16")
    measure = gshard.make_eval_step(mean_loss, plan)
    before = float(measure(state, batch(0)))
    np.testing.assert_allclose(before, mean_loss(initial(), batch(0)), rtol=2e-2)
    step = gshard.make_train_step(mean_loss, plan)
    for i in range(STEPS):
        state, _ = step(state, batch(i))
    assert {x.dtype for x in jax.tree.leaves(state.params[KEY])} == {jnp.dtype("float32")}
    trained = traverse_util.unflatten_dict(expected(), sep="/")
    assert float(mean_loss(trained, batch(0))) < 0.98 * before
    np.testing.assert_allclose(measure(state, batch(0)), mean_loss(trained, batch(0)), rtol=5e-3)


def test_what_cannot_be_is_refused_in_words():
    _, plan = divided("os")
    with pytest.raises(gshard.GShardError, match=rf"sync=False.*{KEY}.*micro_batches="):
        gshard.value_and_grad(mean_loss, plan, sync=False)
    for params, words in {
        "another collection": ({**initial(), "batch_stats": {}}, "fields of their own"),
        "no parameters": ({KEY: initial()[KEY]}, "'params'"),
        "integers": ({**initial(), KEY: {"count": jnp.arange(3)}}, f"{KEY}/count has dtype int32"),
    }.values():
        with pytest.raises(gshard.GShardError, match=words):
            gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32, dot_general_cls=fp8)(jnp.tanh(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, KEY: 0}
        scan = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


@pytest.mark.filterwarnings("ignore:.*dimension 0 of .*, which is the sharded one")
@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_scanned_layers_are_those_of_one_device(level):
    """`jax.checkpoint` makes NaN of the largest float8_e4m3fn numbers that it saves."""
    rng = np.random.default_rng(3)
    batches = [{"x": rng.normal(size=(16, 32)).astype(np.float32)} for _ in range(3)]
    for b in batches:
        b["x"] *= 1 + np.arange(16)[:, None]

    def loss(variables, b):
        return jnp.square(Scanned().apply(variables, b["x"])).mean() / 100

    def made():
        params = jax.jit(Scanned().init)(jax.random.key(0), batches[0]["x"])
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    one, on_one = made(), jax.jit(jax.value_and_grad(loss))
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(made(), mesh, level, min_shard_size=16)
    step = gshard.make_train_step(loss, plan)
    for b in batches:
        value, grads = on_one(one.params, b)
        one = one.apply_gradients(grads=grads)
        state, metrics = step(state, b)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_same(gshard.full_params(state), flat(one.params))
