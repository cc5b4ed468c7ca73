"""The step takes over the state's memory, and never the caller's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from gshard.sharding import validate
from tests.tiers import quick
from tests.zoo import ZOO, feature_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LEVELS = ("dp", "os", "os_g", "p_g_os")
ROWS, STEPS = 16, 3
MODEL = ZOO["linen_mlp"]
NNX_MODEL = ZOO["nnx_mlp"]


def on_mesh(state: Any) -> Any:
    """Arrays that are replicated already, where a copy is easily forgotten."""
    mesh = gshard.make_mesh()
    return jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))


def divided_already(state: Any) -> Any:
    """Arrays that are sharded already, where their first dimension is divisible."""
    mesh = gshard.make_mesh()

    def place(x):
        x = jnp.asarray(x)
        spec = jax.P("shard") if x.ndim and x.shape[0] % 8 == 0 else jax.P()
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda state: jax.tree.map(np.array, state),
    "uncommitted": lambda state: state,
    "committed": lambda state: jax.device_put(state, jax.devices()[0]),
    "another device": lambda state: jax.device_put(state, jax.devices()[3]),
    "on the mesh": on_mesh,
    "divided": divided_already,
}


def host_copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def buffers(tree: Any) -> set[int]:
    """Addresses of every device's buffer of every array."""
    return {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array)
        for shard in x.addressable_shards
    } | {x.ctypes.data for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray)}


def assert_untouched(tree: Any, before: Any) -> None:
    """Alive, and with the values it had."""
    for x, want in zip(jax.tree.leaves(tree), jax.tree.leaves(before), strict=True):
        assert not (isinstance(x, jax.Array) and x.is_deleted()), "an array was deleted"
        np.testing.assert_array_equal(np.asarray(x), want)


@pytest.mark.parametrize(
    ("source", "level"),
    quick(
        itertools.product(SOURCES, LEVELS),
        [
            ("numpy", "os"),
            ("uncommitted", "p_g_os"),
            ("committed", "dp"),
            ("another device", "os_g"),
            ("on the mesh", "dp"),
            ("on the mesh", "p_g_os"),
            ("divided", "os_g"),
        ],
    ),
)
def test_the_callers_arrays_live_on(source, level):
    state = SOURCES[source](MODEL.state(optax.adam(1e-2)))
    before, theirs = host_copy(state), buffers(state)
    ours, plan = gshard.shard_train_state(state, gshard.make_mesh(), level, **MODEL.options())
    assert not theirs & buffers(ours), "the divided state shares memory with the caller's"
    step = gshard.make_train_step(MODEL.loss, plan)
    for i in range(STEPS):
        first = jax.tree.leaves(ours.params)[0]
        ours, _ = step(ours, MODEL.batch(0, ROWS, i))
        assert first.is_deleted(), "the step did not take the state's memory over"
    assert_untouched(state, before)
    state.apply_gradients(grads=state.params)


@pytest.mark.parametrize("level", LEVELS)
def test_params_and_tx_live_on(level):
    params = MODEL.init(0)
    before = host_copy(params)
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-2)), gshard.make_mesh(), level, **MODEL.options()
    )
    step = gshard.make_train_step(MODEL.loss, plan)
    for i in range(STEPS):
        state, _ = step(state, MODEL.batch(0, ROWS, i))
    assert_untouched(params, before)


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_an_nnx_model_and_its_clones_live_on(level):
    model, optimizer = NNX_MODEL.state(optax.adam(1e-2))
    clone, held = nnx.clone(model), nnx.state(model)
    before, optimizer_before = host_copy(held), host_copy(nnx.state(optimizer))
    ours, plan = gshard.shard_train_state(
        (model, optimizer), gshard.make_mesh(), level, **NNX_MODEL.options()
    )
    assert ours[0] is not model
    assert not buffers(nnx.state((model, optimizer, clone))) & buffers(nnx.state(ours))
    step = gshard.make_train_step(NNX_MODEL.loss, plan)
    for i in range(STEPS):
        step(*ours, NNX_MODEL.batch(0, ROWS, i))
    for tree in (nnx.state(model), nnx.state(clone), held):
        assert_untouched(tree, before)
    assert_untouched(nnx.state(optimizer), optimizer_before)
    assert np.isfinite(NNX_MODEL.loss(clone, NNX_MODEL.batch(0, ROWS, 0)))
    grads = nnx.grad(NNX_MODEL.loss)(model, NNX_MODEL.batch(0, ROWS, 0))
    optimizer.update(model, grads)


class WithKey(TrainState):
    key: Any


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_the_key_of_a_step_may_be_that_of_the_state(make):
    """Without a copy one program would be given the same memory as donated and as it is."""
    params = {"w": np.ones((8, 8), np.float32)}
    state = WithKey.create(apply_fn=None, params=params, tx=optax.sgd(0.1), key=make(0))
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=0)

    def loss(params, batch, *, rng):
        return jnp.square(batch @ params["w"]).mean() * jax.random.uniform(rng)

    step = gshard.make_train_step(loss, plan, rng=state.key)
    own = jax.tree.map(jnp.copy, state)
    state.key.delete()  # as a donation does
    for _ in range(2):
        own, metrics = step(own, params["w"])
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
def test_without_donation_every_state_lives_on(level):
    state, plan = gshard.shard_train_state(
        MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), level, **MODEL.options()
    )
    before = host_copy(state)
    step = gshard.make_train_step(MODEL.loss, plan, donate=False)
    once, _ = step(state, MODEL.batch(0, ROWS, 0))
    twice, _ = step(state, MODEL.batch(0, ROWS, 0))
    assert_untouched(state, before)
    jax.tree.map(np.testing.assert_array_equal, host_copy(once), host_copy(twice))


@pytest.mark.parametrize("level", LEVELS)
def test_batches_are_not_donated(level):
    state, plan = gshard.shard_train_state(
        MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), level, **MODEL.options()
    )
    step = gshard.make_train_step(MODEL.loss, plan)
    host = MODEL.batch(0, ROWS, 0)
    kept = host_copy(host)
    placed = gshard.shard_batch(host, plan)
    for _ in range(STEPS):
        state, _ = step(state, placed)
        state, _ = step(state, host)
    assert_untouched(placed, kept)
    assert_untouched(host, kept)


def test_full_params_and_unwrap_are_copies():
    """What leaves gshard does not change or die with the next step."""
    state, plan = gshard.shard_train_state(
        MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), "os", **MODEL.options()
    )
    step = gshard.make_train_step(MODEL.loss, plan)
    whole, plain = gshard.full_params(state), plan.unwrap(state)
    kept = host_copy((whole, plain))
    for i in range(STEPS):
        state, _ = step(state, MODEL.batch(0, ROWS, i))
    assert_untouched((whole, plain), kept)


# Every byte of the state is aliased. Adafactor's too, whose update makes new placeholders without
# reading the old ones: what a skipped step keeps is read.

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
}


def plain_state(tx: optax.GradientTransformation) -> TrainState:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "a": {"kernel": jax.random.normal(keys[0], (7, 39)), "bias": jnp.zeros(39)},
        "b": {"kernel": jax.random.normal(keys[1], (39, 64)), "bias": jnp.zeros(64)},
        "c": {"kernel": jax.random.normal(keys[0], (64, 11)), "bias": jnp.zeros(11)},
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def plain_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for name in ("a", "b", "c"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(jnp.square(x - jax.nn.one_hot(batch["y"], 11)))


def bytes_on_one_device(tree: Any) -> int:
    return sum(
        x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize(
    ("name", "level", "devices"),
    quick(
        itertools.product(OPTIMIZERS, LEVELS, [4, 5]),
        [
            ("adamw", "dp", 4),
            ("adamw", "os", 5),
            ("adamw", "os_g", 4),
            ("adamw", "p_g_os", 5),
            ("adafactor", "os", 5),
            ("adafactor", "p_g_os", 4),
            ("sgd", "os_g", 5),
            ("clip", "os_g", 5),
        ],
    ),
)
def test_every_byte_is_aliased(name, level, devices):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state(
        plain_state(OPTIMIZERS[name]()), mesh, level, min_shard_size=64
    )
    step = gshard.make_train_step(plain_loss, plan)
    memory = step.lower(state, feature_rows(0, 40, 0)).compile().memory_analysis()
    expected = bytes_on_one_device((state.params, state.opt_state, state.step))
    assert memory.alias_size_in_bytes == expected


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_every_byte_is_aliased_nnx(level):
    pair, plan = gshard.shard_train_state(
        NNX_MODEL.state(optax.adamw(1e-3)), gshard.make_mesh(), level, **NNX_MODEL.options()
    )
    step = gshard.make_train_step(NNX_MODEL.loss, plan)
    memory = step.lower(*pair, NNX_MODEL.batch(0, ROWS, 0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == bytes_on_one_device(nnx.state(pair))


def test_what_the_step_returned_is_not_looked_at_again_leaf_by_leaf(monkeypatch):
    seen: list[Any] = []
    fault = validate._fault
    monkeypatch.setattr(validate, "_fault", lambda x, wanted: seen.append(x) or fault(x, wanted))
    params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.adam(0.1)), gshard.make_mesh(), "p_g_os", min_shard_size=8
    )
    step = gshard.make_train_step(lambda p, x: jnp.mean(x @ p["w"] + p["b"]), plan)
    rows = gshard.shard_batch(np.ones((8, 8), np.float32), plan)
    old = state
    state, _ = step(state, rows)
    first = len(seen)
    assert first == len(jax.tree.leaves(state))
    again, _ = step(state, rows)
    assert len(seen) == first
    # What is not what the step returned is looked at: an older state, a leaf that was replaced.
    for used in (old, state):
        with pytest.raises(gshard.DonatedStateError):
            step(used, rows)
    with pytest.raises(gshard.GShardError, match="w is float32\\[9, 4\\]"):
        step(again.replace(params={**again.params, "w": jnp.ones((9, 4))}), rows)
    with pytest.raises(gshard.GShardError, match="the same array"):
        step(again, again.params["w"])
    moved = again.replace(params=jax.tree.map(jnp.copy, again.params))
    step(moved, rows)
    assert len(seen) > first
