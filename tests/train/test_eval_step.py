"""Evaluation, full values, the plain state back, abstract states, mutable collections, rng."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
per_device = partial(gshard.make_train_step, loss_semantics="per_device")


class Net(nn.Module):
    norm: bool = False
    axes: Any = None

    @nn.compact
    def __call__(self, x, train=False, dropout=0.0):
        x = nn.Dense(26, use_bias=not self.norm)(x)  # BatchNorm cancels a bias
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, axis_name=self.axes)(x)
        if dropout:
            x = nn.Dropout(dropout, deterministic=not train)(x)
        return nn.Dense(7)(jnp.tanh(x))


def batch():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(24, 13)).astype(np.float32), "y": rng.integers(0, 7, 24)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def params(net):
    return net.init(jax.random.key(0), batch()["x"])


def loss_fn(p, b):
    return cross_entropy(Net().apply({"params": p}, b["x"]), b["y"]).mean()


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_eval_step_full_params_and_unwrap(level):
    start = params(Net())["params"]
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=Net().apply, params=start, tx=tx)
    mesh = gshard.make_mesh(devices=jax.devices()[:6])
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)

    def measures(p, b):
        logits = Net().apply({"params": p}, b["x"])
        losses = cross_entropy(logits, b["y"])
        odd = b["y"] % 2
        return {
            "mean": losses.mean(),
            "logits": logits,
            "odd": gshard.Weighted((losses * odd).sum(), odd.sum()),
        }

    evaluate = gshard.make_eval_step(measures, plan)
    found = evaluate(state, batch())
    losses = cross_entropy(Net().apply({"params": start}, batch()["x"]), batch()["y"])
    odd = batch()["y"] % 2
    np.testing.assert_allclose(found["mean"], losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["odd"], (losses * odd).sum() / odd.sum(), rtol=1e-6)
    right = Net().apply({"params": start}, batch()["x"])
    np.testing.assert_allclose(found["logits"], right, atol=1e-6)

    for ours, whole in zip(
        jax.tree.leaves(gshard.full_params(state)), jax.tree.leaves(start), strict=True
    ):
        np.testing.assert_array_equal(ours, whole)
    step = gshard.make_train_step(loss_fn, plan)
    state, _ = step(state, batch())
    plain = plan.unwrap(state)
    assert type(plain) is TrainState and plain.tx is tx and int(plain.step) == 1
    assert jax.tree.structure(plain.opt_state) == jax.tree.structure(tx.init(start))
    again = plain.apply_gradients(grads=jax.grad(loss_fn)(plain.params, batch()))
    state, _ = step(state, batch())
    for ours, right in zip(
        jax.tree.leaves(gshard.full_params(state)), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_allclose(ours, right, atol=1e-6)


def test_eval_step_refuses_what_it_cannot_join():
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state(
        (params(Net())["params"], optax.sgd(1.0)), mesh, "os", min_shard_size=16
    )

    def five(p, b):
        return jnp.arange(5.0)

    with pytest.raises(gshard.GShardError, match="one entry for each"):
        gshard.make_eval_step(five, plan, loss_semantics="per_device")(state, batch())
    np.testing.assert_array_equal(gshard.make_eval_step(five, plan)(state, batch()), np.arange(5.0))
    with pytest.raises(gshard.GShardError, match="evaluation output 'name' is 'a'"):
        gshard.make_eval_step(lambda p, b: {"name": "a"}, plan)(state, batch())


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("level", LEVELS)
def test_abstract_state_is_the_state_without_its_arrays(level, kind):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    if kind == "linen":
        given = (params(Net())["params"], optax.adam(1e-2))
    else:
        model = nnx.Linear(13, 26, rngs=nnx.Rngs(0))
        given = (model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))
    state, plan = gshard.shard_train_state(given, mesh, level, min_shard_size=16)
    concrete, abstract = (
        jax.tree.leaves(nnx.state(s) if kind == "nnx" else s)
        for s in (state, plan.abstract_state())
    )
    for x, a in zip(concrete, abstract, strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)


def test_a_plan_needs_no_devices():
    mesh = jax.sharding.AbstractMesh(
        (64, 16), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def init():
        return {"w": jnp.zeros((32, 8192, 8192))}, optax.adam(1e-3)

    state, plan = gshard.shard_train_state(init, mesh, "p_g_os", scan_axes={"w": 0})
    assert plan.params["w"].shard_shape in {(32, 8, 8192), (32, 8192, 8)}
    assert state.params["w"].shape == (32, 8192, 8192)
    assert plan.bytes_per_device["opt_state"] == pytest.approx(
        2 * 32 * 8192 * 8192 * 4 / 1024, abs=40
    )
    assert "a', 'b" in str(plan) or "dim" in str(plan)


class WithStats(TrainState):
    batch_stats: Any
    seen: Any


@pytest.mark.parametrize(
    ("micro_batches", "level"),
    quick(itertools.product([1, 3], LEVELS), [(1, "dp"), (3, "os"), (3, "os_g"), (1, "p_g_os")]),
)
def test_batch_stats_come_back_as_one_value(level, micro_batches):
    net = Net(norm=True)
    start = params(net)
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state = WithStats.create(
        apply_fn=None,
        params=start["params"],
        tx=optax.sgd(0.1),
        batch_stats=start["batch_stats"],
        seen=jnp.arange(3.0),
    )
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)

    def loss(p, b, *, batch_stats):
        logits, new = net.apply(
            {"params": p, "batch_stats": batch_stats}, b["x"], train=True, mutable="batch_stats"
        )
        return cross_entropy(logits, b["y"]).mean(), {"batch_stats": new["batch_stats"]}

    step = gshard.make_train_step(
        loss,
        plan,
        mutable="batch_stats",
        micro_batches=micro_batches,
        loss_semantics="per_micro_batch",
    )
    state, _ = step(state, batch())
    assert type(state) is WithStats
    np.testing.assert_array_equal(state.seen, np.arange(3.0))
    stored = state.batch_stats["BatchNorm_0"]["mean"]
    mean = plan.unwrap(state).batch_stats["BatchNorm_0"]["mean"]
    for shard in stored.addressable_shards:  # sharded at p_g_os
        part = np.pad(mean, (0, stored.size - mean.size))[shard.index]
        np.testing.assert_array_equal(shard.data, part)
    x = batch()["x"]
    hidden = x @ start["params"]["Dense_0"]["kernel"]
    expected = np.zeros(26, np.float32)
    for rows in np.asarray(hidden).reshape(4, micro_batches, -1, 26).swapaxes(0, 1):
        expected = 0.99 * expected + 0.01 * rows.mean((0, 1))
    np.testing.assert_allclose(mean, expected, atol=1e-6)


@pytest.mark.parametrize("level", quick(["os", "p_g_os"], ["p_g_os"]))
def test_with_sync_buffers_those_of_the_first_device_count(level):
    class State(TrainState):
        seen: Any

    seen = {"sum": jnp.zeros(26), "count": jnp.array([-7, 3]), "any": jnp.array([False, True])}
    start = params(Net())["params"]
    state = State.create(apply_fn=None, params=start, tx=optax.sgd(0.1), seen=seen)
    mesh = gshard.make_mesh(replica=2, devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)

    def loss(p, b, *, seen):
        low = b["y"].min()
        new = {
            "sum": seen["sum"] + b["x"].sum(),
            "count": seen["count"] - low - 1,
            "any": seen["any"] & (low < 0),
        }
        return loss_fn(p, b), {"seen": new}

    options = {"mutable": "seen", "sync_buffers": True}
    with pytest.warns(gshard.GShardWarning, match="sync_buffers=True changes nothing"):
        gshard.make_train_step(loss, plan, **options)
    step = gshard.make_train_step(loss, plan, loss_semantics="per_device", **options)
    rows = batch()
    rows["y"][:6] = np.maximum(rows["y"][:6], 1)
    state, _ = step(state, rows)
    found = plan.unwrap(state).seen
    first = {k: x[:6] for k, x in rows.items()}
    np.testing.assert_allclose(found["sum"], np.full(26, first["x"].sum()), rtol=1e-5)
    np.testing.assert_array_equal(found["count"], np.array([-7, 3]) - first["y"].min() - 1)
    np.testing.assert_array_equal(found["any"], [False, False])
    with pytest.raises(gshard.GShardError, match="sync_buffers=1 must be True or False"):
        gshard.make_train_step(loss, plan, sync_buffers=1)


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
def test_batch_norm_over_the_data_axes_is_one_device(level):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    net, synced = Net(norm=True), Net(norm=True, axes=("shard",))
    start = params(net)

    def loss_of(module):
        def loss(p, b):
            variables = {"params": p, "batch_stats": start["batch_stats"]}
            logits, _ = module.apply(variables, b["x"], train=True, mutable="batch_stats")
            return cross_entropy(logits, b["y"]).mean()

        return loss

    state, plan = gshard.shard_train_state(
        (start["params"], optax.sgd(1.0)), mesh, level, min_shard_size=16
    )
    assert plan.data_axes == ("shard",)
    state, _ = gshard.make_train_step(loss_of(synced), plan)(state, batch())
    expected = jax.grad(loss_of(net))(start["params"], batch())
    leaves = (gshard.full_params(state), start["params"], expected)
    for new, old, g in zip(*map(jax.tree.leaves, leaves), strict=True):
        assert np.abs(old - new - g).max() <= 2e-6 * np.abs(old).max() + 2e-6 * np.abs(g).max()


def test_rng_differs_by_step_device_and_micro_batch():
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    start = ({"w": jnp.zeros((4, 4))}, optax.sgd(0.0))
    state, plan = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)

    def loss(p, b, *, rng):
        draw = jax.random.uniform(rng)
        mine = jnp.where(b["row"] >= 0, draw, 0.0)
        return p["w"].sum() * 0 + mine.mean(), {"mean": draw, "square": draw**2}

    step = per_device(loss, plan, has_aux=True, rng=jax.random.key(3), micro_batches=2)
    seen = []
    for _ in range(2):
        state, metrics = step(state, {"row": np.arange(8)})
        seen.append((float(metrics["aux"]["mean"]), float(metrics["aux"]["square"])))
    assert seen[0] != seen[1]
    for mean, square in seen:
        assert square - mean**2 > 1e-3  # the eight draws are not one draw
    fresh, _ = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)
    _, metrics = step(fresh, {"row": np.arange(8)})
    assert float(metrics["aux"]["mean"]) == seen[0][0]  # the same seed, the same numbers


def draws(state, plan, steps, **options):
    """Variance over 4 devices x 2 micro-batches of what a loss draws, and its mean, by step."""

    def loss(p, b, *, rng=None, key=None):
        draw = jax.random.uniform(key if rng is None else rng)
        return p["w"].sum() * 0, {"mean": draw, "square": draw**2}

    given = loss if options else partial(loss, rng=None)
    step = per_device(given, plan, has_aux=True, micro_batches=2, **options)
    found = []
    for _ in range(steps):
        state, metrics = step(state, {"row": np.arange(8)})
        mean, square = (float(metrics["aux"][name]) for name in ("mean", "square"))
        found.append((square - mean**2, mean))
    return zip(*found, strict=True)


class WithKey(TrainState):
    key: Any


@pytest.mark.parametrize("devices, k", [(3, 2), pytest.param(8, 3, marks=pytest.mark.slow)])
def test_a_key_for_each_row_draws_the_same_on_any_number_of_devices(devices, k):
    rows = 24
    params = {"w": np.random.default_rng(0).normal(size=(7, 26)).astype(np.float32)}
    x = np.random.default_rng(1).normal(size=(rows, 7)).astype(np.float32)
    given = {"x": x, "key": jax.random.split(jax.random.key(2), rows)}

    def loss(p, b):
        drawn = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (26,)))(b["key"])
        return jnp.mean(jnp.where(drawn, b["x"] @ p["w"], 0) ** 2)

    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=4
    )
    _, metrics = gshard.make_train_step(loss, plan, micro_batches=k)(state, given)
    np.testing.assert_allclose(metrics["loss"], loss(params, given), rtol=1e-6)


@pytest.mark.parametrize("source", ["typed", "old style", "field"])
def test_every_kind_of_key_differs_by_step_device_and_micro_batch(source):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    start = WithKey.create(
        apply_fn=None,
        params={"w": jnp.zeros((4, 4))},
        tx=optax.sgd(0.0),
        key=jax.random.key(7),
    )
    state, plan = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)
    keys = {"typed": jax.random.key(3), "old style": jax.random.PRNGKey(3)}
    given = {"rng": keys[source]} if source in keys else {}
    variances, means = draws(state, plan, 3, **given)
    assert min(variances) > 1e-3
    assert len(set(means)) == 3


def test_a_weighted_aux_is_divided_by_its_own_weight():
    rows = {"x": np.arange(24, dtype=np.float32), "mask": np.zeros(24, np.float32)}
    rows["mask"][[0, 5, 6, 7, 23]] = 1

    def loss(p, b):
        counted = gshard.Weighted((b["x"] * b["mask"]).sum(), (b["mask"] > 0).sum())
        vector = gshard.Weighted(jnp.stack([counted.sum, 2 * counted.sum]), counted.weight)
        aux = {"masked": counted, "vector": vector, "mean": b["x"].mean()}
        return (p["w"] * b["x"].mean()).sum(), aux

    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    start = ({"w": jnp.ones(8)}, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)
    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=3)
    state, metrics = step(state, rows)
    expected = rows["x"][rows["mask"] > 0].mean()
    np.testing.assert_allclose(metrics["aux"]["masked"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["aux"]["vector"], [expected, 2 * expected], rtol=1e-6)
    evaluate = gshard.make_eval_step(lambda p, b: loss(p, b)[1], plan)
    found = evaluate(state, rows)
    assert found["vector"].shape == (2,)
    np.testing.assert_allclose(found["vector"], [expected, 2 * expected], rtol=1e-6)
    np.testing.assert_allclose(metrics["aux"]["mean"], rows["x"].mean(), rtol=1e-6)


def test_the_loss_reaches_an_optimizer_that_asks_for_it():
    tx = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))

    def loss(p, b):
        return (p["w"] * 0).sum() + b["x"].mean()  # a plateau

    start = ({"w": jnp.ones((8, 8))}, tx)
    state, plan = gshard.shard_train_state(start, gshard.make_mesh(), "os_g", min_shard_size=8)
    step = gshard.make_train_step(loss, plan)
    for _ in range(4):
        state, _ = step(state, {"x": np.ones(8, np.float32)})
    assert float(plan.unwrap(state).opt_state[1].scale) < 1


def strict(scale):
    """A transformation whose update takes one further argument, and no other."""

    def update(updates, state, params=None, *, scale=scale):
        return jax.tree.map(lambda g: -scale * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
        lambda: strict(0.1),
        lambda: optax.MultiSteps(optax.contrib.reduce_on_plateau(), 2),
    ],
    ids=["sam", "strict", "MultiSteps(plateau)"],
)
def test_an_optimizer_is_given_no_more_than_it_takes(make):
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=make())
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=8)
    step = gshard.make_train_step(lambda p, b: (p["w"] * b["x"].mean()).sum(), plan)
    for _ in range(3):
        state, _ = step(state, {"x": np.ones(8, np.float32)})
    assert int(state.step) == 3
    assert float(jnp.abs(gshard.full_params(state)["w"] - 1).max()) > 1e-3


@pytest.mark.parametrize("wrap", [nnx.remat, nnx.jit], ids=["remat", "jit"])
def test_nnx_dropout_inside_a_transform_trains_and_draws_again(wrap):
    class Wrapped(nnx.Module):
        def __init__(self, rngs):
            self.inner = Dropped(rngs)

        def __call__(self, x):
            return wrap(lambda inner, x: inner(x))(self.inner, x)

    model = Wrapped(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    pair, plan = gshard.shard_train_state(
        (model, optimizer), gshard.make_mesh(), "p_g_os", min_shard_size=16
    )
    step = gshard.make_train_step(lambda m, b: jnp.square(m(b["x"])).mean(), plan)
    losses = {float(step(*pair, {"x": np.ones((8, 13), np.float32)})["loss"]) for _ in range(3)}
    assert len(losses) == 3
    assert int(pair[0].inner.drop.rngs.count[...]) == 3


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(13, 26, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.a(x))


def test_nnx_dropout_differs_by_device_and_its_count_moves_on():
    model = Dropped(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    (model, optimizer), plan = gshard.shard_train_state(
        (model, optimizer), mesh, "p_g_os", min_shard_size=16
    )

    def loss(model, b):
        out = model(b["x"])
        kept = (out != 0).astype(jnp.float32)
        return jnp.square(out).mean(), kept[0]

    step = per_device(loss, plan, has_aux=True, micro_batches=2)
    before = int(model.drop.rngs.count[...])
    metrics = step(model, optimizer, {"x": np.ones((8, 13), np.float32)})
    assert int(model.drop.rngs.count[...]) == before + 2
    # One mask on every device and micro-batch would average to zeros and ones only.
    assert set(np.unique(metrics["aux"])) - {0.0, 1.0}


def test_weighted_loss_is_divided_once_by_the_global_weight():
    mask = np.zeros(24, np.float32)
    mask[[0, 1, 2, 3, 9, 23]] = 1  # uneven over devices, none on some
    rows = {**batch(), "mask": mask}

    def weighted(p, b):
        losses = cross_entropy(Net().apply({"params": p}, b["x"]), b["y"])
        return gshard.Weighted((losses * b["mask"]).sum(), b["mask"].sum())

    def mean(p, b):
        out = weighted(p, b)
        return out.sum / out.weight

    start = params(Net())["params"]
    for level in LEVELS:
        mesh = gshard.make_mesh(devices=jax.devices()[:4])
        state, plan = gshard.shard_train_state(
            (start, optax.sgd(1.0)), mesh, level, min_shard_size=16
        )
        state, metrics = gshard.make_train_step(weighted, plan, micro_batches=3)(state, rows)
        value, grads = jax.value_and_grad(mean)(start, rows)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-6)
        for new, old, g in zip(
            *map(jax.tree.leaves, (gshard.full_params(state), start, grads)), strict=True
        ):
            np.testing.assert_allclose(old - new, g, atol=1e-6)


@pytest.mark.parametrize(("dtype", "large"), [("float16", 30000), ("float8_e4m3fn", 256)])
def test_narrow_means_of_devices_do_not_overflow_in_their_sum(dtype, large):
    class WithStats(TrainState):
        stats: Any = None

    params, stats = {"w": np.ones(8, np.float32)}, jnp.zeros(2, dtype)
    state = WithStats.create(apply_fn=None, params=params, tx=optax.sgd(0.1), stats=stats)
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=0)
    large = jnp.asarray(large, dtype)
    x = np.ones((16, 8), np.float32)

    def value(params, x):
        return large

    evaluate = gshard.make_eval_step(value, plan, loss_semantics="per_device")
    assert float(evaluate(state, x)) == large

    def loss(params, x, *, stats):
        return (x @ params["w"]).mean(), {"stats": jnp.full_like(stats, large)}

    step = gshard.make_train_step(loss, plan, mutable="stats", loss_semantics="per_device")
    found = step(state, x)[0].stats
    assert found.dtype == dtype and (found == large).all()
