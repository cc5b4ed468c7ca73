"""`make_train_step(post_update=)`: what runs after the update, inside the compiled step."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState

import gshard

LEVELS = ["dp", "os", "os_g", "p_g_os"]
DEVICES, ROWS, STEPS = 3, 12, 3
KEY = jax.random.key(7)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


class Averaged(TrainState):
    ema: Any
    count: Any
    key: Any


def fresh(key=None):
    rng = np.random.default_rng(0)
    shapes = {"a": (7, 13), "b": (13, 5), "bias": (5,), "base": (7, 5)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    ema = jax.tree.map(np.zeros_like, params)
    return Averaged.create(apply_fn=None, params=params, tx=OPTIMIZER, ema=ema, count=0, key=key)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in (("x", 7), ("y", 5))}


def loss_fn(p, b):
    x = b["x"].astype(p["a"].dtype)
    out = jnp.tanh(x @ p["a"]) @ p["b"] + p["bias"] + x @ p["base"]
    return ((out.astype(jnp.float32) - b["y"]) ** 2).mean()


def average(state):
    """An average with a decay that the optimizer's own count gives; weights are held in a box."""
    decay = 1 - 1 / (1 + optax.tree.get(state.opt_state, "count").astype(jnp.float32))
    ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, state.params)
    params = {**state.params, "b": jnp.clip(state.params["b"], -1, 1)}
    key = state.key if state.key is None else jax.random.split(state.key)[0]
    return state.replace(ema=ema, params=params, count=state.count + state.step, key=key)


def only_average(state):
    ema = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, state.ema, state.params)
    return state.replace(ema=ema)


def divided(level, key=None, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    return gshard.shard_train_state(fresh(key), mesh, level, min_shard_size=8, **options)


@pytest.fixture(scope="module")
def one_device():
    @jax.jit
    def step(state, b):
        grads = jax.grad(loss_fn)(state.params, b)
        grads["base"] = jnp.zeros_like(grads["base"])  # frozen
        return average(state.apply_gradients(grads=grads))

    state = fresh(KEY)
    for i in range(STEPS):
        state = step(state, batch(i))
    return state


def values(state):
    """Every array of a state but the counts of skipped steps, keys as numbers."""
    kept = (state.params, state.opt_state.inner, state.step, state.ema, state.count)
    kept = [
        *jax.tree.leaves(kept),
        *([] if state.key is None else [jax.random.key_data(state.key)]),
    ]
    return [np.asarray(x) for x in kept]


def levels(*quick):
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in LEVELS]


@pytest.mark.parametrize("level", levels("p_g_os"))
def test_training_matches_single_device_and_a_skipped_step(level, one_device):
    state, plan = divided(level, KEY if level == "os_g" else None, frozen="base")
    placed = jax.tree.map(lambda x: x.sharding, state)
    step = gshard.make_train_step(loss_fn, plan, post_update=average)
    for i in range(STEPS):
        state, _ = step(state, batch(i))
    assert state.key is not None or step.jitted._cache_size() == 1
    now = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state))
    for x, before, after in zip(jax.tree.leaves(state), jax.tree.leaves(placed), now, strict=True):
        assert after.is_equivalent_to(before, x.ndim)
    found = gshard.audit(step, state, batch())
    assert not [row for row in found.collectives if row.purpose == "compiler" and not row.scalar]
    for kind in ("reduce-scatter", "all-reduce"):
        assert found.elements(kind) == step.budget.elements(kind)
    plain = plan.unwrap(state)
    assert int(plain.count) == int(one_device.count) == 6 and int(plain.step) == STEPS
    if plain.key is not None:
        keys = [jax.random.key_data(x.key) for x in (plain, one_device)]
        np.testing.assert_array_equal(*keys)
    for name in ("params", "ema"):
        for path, want in getattr(one_device, name).items():
            np.testing.assert_allclose(getattr(plain, name)[path], want, rtol=0, atol=5e-6)
    assert np.abs(plain.params["b"]).max() == 1

    before = values(state)
    bad = batch(9)
    bad["x"][5, 2] = np.nan
    state, metrics = step(state, bad)
    assert int(metrics["skipped_steps"]) == 1
    for x, y in zip(values(state), before, strict=True):
        np.testing.assert_array_equal(x, y)


def moved(step, state):
    found = gshard.audit(step, state, batch())
    return {(r.kind, r.axes, r.purpose, r.scalar): (r.count, r.elements) for r in found.collectives}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_an_average_moves_nothing(level):
    state, plan = divided(level)
    with_average = gshard.make_train_step(loss_fn, plan, post_update=only_average)
    assert moved(with_average, state) == moved(gshard.make_train_step(loss_fn, plan), state)
    assert state.ema["a"].sharding == state.params["a"].sharding


@pytest.mark.parametrize("level", levels("os"))
def test_with_a_precision_it_sees_and_changes_the_master_copies(level):
    state, plan = divided(level, precision="bfloat16")
    step = gshard.make_train_step(loss_fn, plan, post_update=average, donate=False)
    new, _ = step(state, batch())
    copies, ema = gshard.full_params(new), plan.unwrap(new).ema
    for path in copies:
        assert ema[path].dtype == copies[path].dtype == np.float32
        want = 2 * ema[path]  # after one step: half of a float32 copy that is not clipped yet
        assert (want != want.astype(jnp.bfloat16)).any()
        want = np.clip(want, -1, 1) if path == "b" else want
        # The compiler may fuse the average with the update, and round it once less.
        np.testing.assert_allclose(copies[path], want, rtol=3e-7)
        layout = plan.params[path]
        low = layout.unpad(np.asarray(new.params[path]))
        np.testing.assert_array_equal(low, want.astype(jnp.bfloat16))
        assert new.params[path].sharding.is_equivalent_to(plan.sharding(layout), low.ndim)
    again, _ = step(new, batch(1))  # the changed copies are what the next step updates
    assert np.abs(gshard.full_params(again)["b"]).max() <= 1


@pytest.mark.slow
def test_what_it_gathers_with_a_precision():
    """Where parameters are replicated, their sharded copies are gathered once, and nothing else."""
    extra = {}
    for level in ("os", "p_g_os"):
        state, plan = divided(level, precision="bfloat16")
        counts = [
            gshard.audit(gshard.make_train_step(loss_fn, plan, **options), state, batch())
            for options in ({"post_update": only_average}, {})
        ]
        kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
        extra[level] = [counts[0].elements(k) - counts[1].elements(k) for k in kinds]
    stored = sum(x.stored_size for x in plan.master.values() if x.dim is not None)
    assert extra["p_g_os"] == [0] * 5
    assert extra["os"][1:] == [0] * 4 and 0 < extra["os"][0] <= stored


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.net = nnx.Linear(7, 5, rngs=rngs)
        self.ema = nnx.Linear(7, 5, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def nnx_average(model, optimizer):
    def mean(e, p):
        return 0.5 * e + 0.5 * p

    ema = jax.tree.map(mean, nnx.state(model.ema), nnx.state(model.net))
    nnx.update(model.ema, ema)
    model.count[...] += optimizer.step[...].astype(jnp.int32)


@pytest.mark.parametrize("level", levels("p_g_os"))
def test_nnx_in_place(level):
    def pair():
        model = Twice(nnx.Rngs(0))
        trained = nnx.All(nnx.Param, nnx.PathContains("net"))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=trained)

    def loss(model, b):
        return ((model.net(b["x"]) - b["y"]) ** 2).mean()

    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    (model, optimizer), plan = gshard.shard_train_state(pair(), mesh, level, min_shard_size=4)
    assert model.ema.kernel[...].is_fully_replicated == (level != "p_g_os")
    step = gshard.make_train_step(loss, plan, post_update=nnx_average)
    alone, plain = pair()

    @nnx.jit
    def one_device(model, optimizer, b):
        wrt = nnx.DiffState(0, optimizer.wrt)
        optimizer.update(model, nnx.grad(loss, argnums=wrt)(model, b))
        nnx_average(model, optimizer)

    for i in range(STEPS):
        step(model, optimizer, batch(i))
        one_device(alone, plain, batch(i))
    assert step.jitted._cache_size() == 1
    found = nnx.state(plan.unwrap((model, optimizer))[0])
    assert int(model.count[...]) == 6
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(nnx.state(alone)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)

    returned = gshard.make_train_step(loss, plan, post_update=lambda m, o: (m, o))
    with pytest.raises(gshard.GShardError, match="in place"):
        returned(model, optimizer, batch())

    def more(model, optimizer):
        model.new = nnx.Variable(jnp.zeros(3))

    with pytest.raises(gshard.GShardError, match="added .*new"):
        gshard.make_train_step(loss, plan, post_update=more)(model, optimizer, batch())


BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (lambda s: None, ("returned None", "Averaged")),
    "params": (lambda s: s.params, ("returned a dict", "state.replace")),
    "missing": (lambda s: s.replace(ema={"a": s.ema["a"]}), ("missing ema/b",)),
    "added": (lambda s: s.replace(ema={**s.ema, "z": s.count}), ("added ema/z",)),
    "shape": (
        lambda s: s.replace(ema={**s.ema, "b": s.ema["a"]}),
        ("makes ema/b float32[7, 13]", "float32[13, 5]"),
    ),
    "dtype": (
        lambda s: s.replace(params={**s.params, "b": s.params["b"].astype(jnp.bfloat16)}),
        ("params/b", "bfloat16[13, 5]", "float32[13, 5]"),
    ),
    "optimizer": (lambda s: s.replace(tx=optax.sgd(0.1)), ("changes tx", "arrays only")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_may_not_change_is_refused_by_path(name):
    fn, words = BAD[name]
    state, plan = divided("p_g_os")
    with pytest.raises(gshard.GShardError) as error:
        gshard.make_train_step(loss_fn, plan, post_update=fn).lower(state, batch())
    for word in words:
        assert word in str(error.value)


def test_an_error_of_its_own_says_where_it_came_from():
    state, plan = divided("p_g_os")

    def reads_a_value(state):
        return state.replace(count=int(state.count))

    step = gshard.make_train_step(loss_fn, plan, post_update=reads_a_value)
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        step.lower(state, batch())
    assert "post_update=" in error.value.__notes__[0]


def test_it_is_a_function():
    _, plan = divided("os")
    with pytest.raises(gshard.GShardError, match="post_update=0.99 is not a function"):
        gshard.make_train_step(loss_fn, plan, post_update=0.99)


@pytest.mark.parametrize("precision", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_with_state_on_the_host(precision):
    """It sees values on the device; what it changes goes back to where it is stored."""

    def shrink(state):
        return state.replace(params=jax.tree.map(lambda p: 0.5 * p, state.params))

    def loss_fn(params, b):
        return jnp.mean((b["x"] @ params["w"]) ** 2)

    params = {"w": np.random.default_rng(0).normal(size=(7, 13)).astype(np.float32)}
    rows = {"x": np.random.default_rng(1).normal(size=(12, 7)).astype(np.float32)}
    found = []
    for offload in (True, False):
        mesh = gshard.make_mesh(devices=jax.devices()[:3])
        options = {"min_shard_size": 4, "offload": offload, "precision": precision}
        start = (params, optax.adam(1e-2))
        state, plan = gshard.shard_train_state(start, mesh, "p_g_os", **options)
        step = gshard.make_train_step(loss_fn, plan, post_update=shrink)
        for _ in range(2):
            state, _ = step(state, rows)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
        assert kinds == {"pinned_host" if offload else "device"}
        found.append(gshard.full_params(state)["w"])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert np.abs(found[0]).max() < 0.3 * np.abs(params["w"]).max()


def test_nnx_attributes_are_fixed():
    def other_rate(model, optimizer):
        optimizer.tx = optax.sgd(0.5)

    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    (model, optimizer), plan = gshard.shard_train_state(pair, mesh, "os", min_shard_size=4)
    step = gshard.make_train_step(
        lambda m, b: (m(b["x"]) ** 2).mean(), plan, post_update=other_rate
    )
    with pytest.raises(gshard.GShardError, match="changes more than arrays.*tx"):
        step(model, optimizer, {"x": np.ones((4, 4), np.float32)})


class WithDecay(TrainState):
    ema: Any = None
    decay: float = struct.field(pytree_node=False, default=0.0)


def test_a_field_that_is_fixed_is_said_to_be():
    start = {"w": np.ones((4, 4), np.float32)}
    state = WithDecay.create(apply_fn=None, params=start, tx=optax.sgd(0.1), ema=start)
    mesh, scale = gshard.make_mesh(devices=jax.devices()[:2]), 1.0
    state, plan = gshard.shard_train_state(state, mesh, "os", min_shard_size=0)

    def mean(state):
        return state.replace(ema=jax.tree.map(lambda e: state.decay * scale * e, state.ema))

    step = gshard.make_train_step(lambda p, b: jnp.mean((b @ p["w"]) ** 2), plan, post_update=mean)
    rows = np.ones((4, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            state, _ = step(state, rows)
    with pytest.warns(gshard.GShardWarning, match="state.decay was 0.0 in shard_train_state and"):
        state, _ = step(state.replace(decay=1.0), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        state, _ = step(state.replace(decay=2.0), rows)
    scale = 2.0
    with pytest.warns(gshard.GShardWarning, match="post_update= reads scale from outside, and"):
        state, _ = step(state.replace(decay=0.0), rows)

    class WithMore(WithDecay):
        name: str = struct.field(pytree_node=False, default="")

    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    step(WithMore(**fields), rows)


def test_it_sees_attributes_of_a_model_as_they_are():
    class Model(nnx.Module):
        def __init__(self):
            self.net, self.decay = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 0.0
            self.ema = nnx.BatchStat(jnp.ones((4, 4)))

    def mean(model, optimizer):
        model.ema[...] = model.decay * model.ema[...]

    model = Model()
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    (model, optimizer), plan = gshard.shard_train_state(pair, mesh, "os", min_shard_size=0)
    step = gshard.make_train_step(lambda m, b: (m.net(b) ** 2).mean(), plan, post_update=mean)
    model.decay = 0.5
    step(model, optimizer, np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(model.ema[...], 0.5 * np.ones((4, 4)))
    model.decay = 1.0
    step(model, optimizer, np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(model.ema[...], 0.5 * np.ones((4, 4)))
