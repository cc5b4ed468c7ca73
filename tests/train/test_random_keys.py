"""How each kind of key is folded, and what draws from it, in both meanings of a loss."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard

DROP = nn.Dropout(0.5, deterministic=False)
make_train_step = partial(gshard.make_train_step, loss_semantics="per_device")
value_and_grad = partial(gshard.value_and_grad, loss_semantics="per_device")
X = np.ones((32, 16), np.float32)
PARAMS = {"w": jnp.ones(16)}
KEY = jax.random.key(7)


def mesh(devices=8):
    return gshard.make_mesh(devices=jax.devices()[:devices])


def drawn(params, x, key):
    """A loss, and as aux the least and the largest code of a mask of one example."""
    z = DROP.apply({}, jnp.ones_like(x), rngs={"dropout": key})
    code = jnp.sum((z[0] > 0) * 2.0 ** jnp.arange(16))
    return jnp.mean(z * params["w"]), {
        "max": gshard.Reduced(code, "max"),
        "min": gshard.Reduced(code, "min"),
    }


def masks_differ(aux: Any) -> bool:
    return float(aux["max"]) != float(aux["min"])


class WithKey(TrainState):
    dropout_rng: Any


def with_key(key):
    return WithKey.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1), dropout_rng=key)


def plain():
    return jax.tree.map(jnp.copy, PARAMS), optax.sgd(0.1)


def says(run) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", gshard.GShardWarning)
        run()
    assert all("rng=" in str(w.message) and w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(("devices", "k"), [(8, 1), (1, 2)])
def test_a_typed_key_in_the_batch(devices, k):
    state, plan = gshard.shard_train_state(plain(), mesh(devices), "p_g_os", min_shard_size=4)

    def loss(params, batch):
        return drawn(params, batch["x"], batch["key"])

    step = make_train_step(loss, plan, has_aux=True, micro_batches=k)
    assert masks_differ(step(state, {"x": X, "key": KEY})[1]["aux"])


def test_a_key_for_each_example_stays_as_it_is():
    keys = jax.random.split(KEY, 32)

    def loss(params, batch):
        z = jax.vmap(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape))(*batch)
        return jnp.mean(z * params["w"])

    want = jax.value_and_grad(loss)(PARAMS, (X, keys))
    state, plan = gshard.shard_train_state(plain(), mesh(), "dp")
    found = jax.jit(value_and_grad(loss, plan))(state.params, (X, keys))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(found[1]["w"], want[1]["w"], rtol=1e-6)


@pytest.mark.parametrize("level", ["dp", "p_g_os"])
def test_an_old_style_key_in_the_state_is_a_typed_one(level):
    def loss(params, x, *, dropout_rng):
        return drawn(params, x, dropout_rng)

    found = []
    for key in (jax.random.PRNGKey(7), KEY):
        state, plan = gshard.shard_train_state(with_key(key), mesh(), level, min_shard_size=1)
        step = make_train_step(loss, plan, has_aux=True, micro_batches=2)
        seen = []
        for _ in range(2):
            state, metrics = step(state, X)
            assert masks_differ(metrics["aux"])
            seen.append([float(x) for x in metrics["aux"].values()])
        assert seen[0] != seen[1]
        found.append(seen)
        assert says(lambda: step(state, X)) == []  # noqa: B023
    assert found[0] == found[1]


def test_numbers_that_look_like_a_key():
    """uint32[2] that no key is made of comes to the loss as it is."""

    def loss(params, x, *, dropout_rng):
        key = jax.random.fold_in(jax.random.key(0), dropout_rng[0])
        z = x * jax.random.bernoulli(jax.random.fold_in(key, x[0, 0].astype(int)), 0.5, x.shape)
        return jnp.mean(z * params["w"]), gshard.Reduced(dropout_rng.astype(jnp.int32), "max")

    pair = with_key(jnp.array([3, 5], jnp.uint32))
    state, plan = gshard.shard_train_state(pair, mesh(), "p_g_os", min_shard_size=1)
    state, metrics = make_train_step(loss, plan, has_aux=True)(state, X)
    assert metrics["aux"].tolist() == [3, 5]


def test_an_old_style_key_that_the_loss_returns():
    def loss(params, x, *, dropout_rng):
        value, _ = drawn(params, x, dropout_rng)
        return value, {"dropout_rng": jax.random.split(dropout_rng)[0]}

    state, plan = gshard.shard_train_state(with_key(jax.random.PRNGKey(0)), mesh(), "dp")
    step = make_train_step(loss, plan, mutable="dropout_rng")
    with pytest.raises(gshard.GShardError, match="changes the PRNG key dropout_rng"):
        step(state, X)


def own_loop(devices=8, k=1, x=X, take=lambda key, x: key):
    """A step of the user's own, whose loss closes over its key."""
    state, plan = gshard.shard_train_state(plain(), mesh(devices), "p_g_os", min_shard_size=4)

    @jax.jit
    def step(params, x, key):
        def loss(params, x):
            return drawn(params, x, take(key, x))

        return value_and_grad(loss, plan, has_aux=True, micro_batches=k)(params, x)

    return says(lambda: step(state.params, gshard.shard_batch(x, plan), KEY))


def test_a_closed_over_key_is_named_once():
    for found in (own_loop(), own_loop(k=2), own_loop(devices=1, k=2), own_loop(x=X[:8])):
        assert len(found) == 1
        assert "draws the same" in found[0]
    assert own_loop(devices=1) == []
    assert own_loop(take=lambda key, x: jax.random.fold_in(key, jax.lax.axis_index("shard"))) == []


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1), None])
def test_a_constant_key_in_a_step(key):
    def loss(params, x):
        return drawn(params, x, jax.random.key(2) if key is None else key)

    state, plan = gshard.shard_train_state(plain(), mesh(), "dp")
    step = make_train_step(loss, plan, has_aux=True)
    assert len(says(lambda: step(state, X))) == 1


def in_a_scan(x, key):
    def layer(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape), None

    return jax.lax.scan(jax.checkpoint(layer), x, jax.random.split(key, 2))[0]


def in_a_branch(x, key):
    return jax.lax.cond(x.sum() > 0, lambda k: jax.random.uniform(k, x.shape), lambda _: x, key)


def in_a_while_loop(x, key):
    def body(at):
        i, x = at
        return i + 1, x + jax.random.uniform(jax.random.fold_in(key, i), x.shape)

    return jax.lax.while_loop(lambda at: at[0] < 2, body, (0, x))[1]


@pytest.mark.parametrize("draw", [in_a_scan, in_a_branch, in_a_while_loop])
def test_draws_in_loops_and_branches(draw):
    state, plan = gshard.shard_train_state(plain(), mesh(), "p_g_os", min_shard_size=4)

    def loss(params, x, *, rng=KEY):
        return jnp.mean(draw(x, rng) * params["w"])

    of_loss = jax.jit(value_and_grad(loss, plan))
    batch = gshard.shard_batch(X, plan)
    assert says(lambda: of_loss(state.params, batch, rng=KEY)) == []
    assert len(says(lambda: of_loss(state.params, batch))) == 1


def test_draws_that_are_the_same_on_one_device():
    """A fixed projection, and one mask for all examples."""

    def loss(params, x):
        features = x @ jax.random.normal(KEY, (16, 16))
        masked = jax.vmap(lambda x: x * jax.random.bernoulli(KEY, 0.5, x.shape))(features)
        return jnp.square(masked * params["w"]).mean()

    want = loss(PARAMS, X)
    state, plan = gshard.shard_train_state(plain(), mesh(), "dp")
    step = make_train_step(loss, plan)
    found = []
    assert says(lambda: found.append(step(state, X)[1]["loss"])) == []
    np.testing.assert_allclose(found[0], want, rtol=1e-5)


class _Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))


def test_keys_that_an_nnx_model_carries():
    model = _Net()
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    pair, plan = gshard.shard_train_state(pair, mesh(), "p_g_os", min_shard_size=1)
    step = make_train_step(lambda m, x: jnp.square(m.drop(m.layer(x))).mean(), plan)
    assert says(lambda: step(*pair, X)) == []


def test_a_step_copies_its_key_once():
    state, plan = gshard.shard_train_state(plain(), mesh(), "p_g_os", min_shard_size=1)
    loss = lambda p, x, *, rng: jnp.mean(mask_of(rng, x) * x[:, :16] * p["w"][:1])  # noqa: E731
    step = gshard.make_train_step(loss, plan, rng=jax.random.key(3))
    batch = gshard.shard_batch(EYE, plan)
    state, _ = step(state, batch)
    with jax.transfer_guard("disallow"):
        step(state, batch)


EYE = np.eye(64, dtype=np.float32)
OLD = jax.random.PRNGKey(7)  # KEY, as uint32[2]
PLACES = {
    "rng=": KEY,
    "closed over": KEY,
    "old-style closed over": OLD,
    "state": KEY,
    "old-style state": OLD,
    "batch": KEY,
    "batch, of each example": jax.random.split(KEY, 64),
    "batch, old-style of each example": jax.random.split(OLD, 64),
}


def mask_of(key, x):
    """Of all examples; of each with its own key if there are so many."""
    if jnp.shape(key)[:1] == (len(x),):
        return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (16,)))(key)
    return jax.random.bernoulli(key, 0.5, (len(x), 16))


def shown(mask, x, k):
    """A mask as aux: entries of examples are returned without micro-batches only."""
    return mask if k == 1 else x.T @ mask  # x is the identity


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_a_global_loss_draws_the_mask_of_one_device(place, k):
    key = PLACES[place]

    def loss(params, batch, *, rng=None, dropout_rng=None):
        given = (rng, dropout_rng, batch.get("key"), key)
        mask = mask_of(next(x for x in given if x is not None), batch["x"])
        ones = batch["x"].sum(1, keepdims=True)  # a loss that does not read its batch is warned of
        return jnp.mean(mask * params["w"] * ones), shown(mask, batch["x"], k)

    state = with_key(key) if "state" in place else plain()
    state, plan = gshard.shard_train_state(state, mesh(), "p_g_os", min_shard_size=1)
    options: Any = {"rng": key} if place == "rng=" else {}
    given = loss if options else partial(loss, rng=None)
    step = gshard.make_train_step(given, plan, has_aux=True, micro_batches=k, **options)
    batch = {"x": EYE, "key": key} if "batch" in place else {"x": EYE}
    masks = []

    def train():
        new = state
        for _ in range(2):
            new, metrics = step(new, batch)
            masks.append(metrics["aux"])

    assert says(train) == []
    folds = place == "rng=" or "state" in place
    for i, found in enumerate(masks):
        wanted = mask_of(jax.random.fold_in(KEY, i) if folds else key, EYE)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("k", [1, 4])
def test_a_global_loss_of_an_nnx_model_draws_the_masks_of_one_device(k):
    model, alone = _Net(), _Net()
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    pair, plan = gshard.shard_train_state(pair, mesh(), "p_g_os", min_shard_size=1)

    def mask_by(model, x):
        return model.drop(jnp.ones((len(x), 16))) > 0

    def loss(model, x):
        mask = mask_by(model, x)
        return jnp.mean(model.layer(mask + 0 * x[:, :1])), shown(mask, x, k)

    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=k)
    for _ in range(3):
        np.testing.assert_array_equal(step(*pair, EYE)["aux"], mask_by(alone, EYE))


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "old"])
def test_a_key_that_the_loss_changes_draws_what_one_device_draws(key):
    def loss(params, x, *, dropout_rng):
        new, own = jax.random.split(dropout_rng)
        noise = jax.random.normal(own, x.shape)
        return ((x + noise) * params["w"]).mean(), {"dropout_rng": new}

    state, plan = gshard.shard_train_state(with_key(key), mesh(4), "os", min_shard_size=0)
    step = gshard.make_train_step(loss, plan, mutable="dropout_rng")
    own, params = key, PARAMS
    for _ in range(3):
        state, metrics = step(state, X)
        of_params = lambda p, own=own: loss(p, X, dropout_rng=own)  # noqa: E731
        (wanted, new), grads = jax.value_and_grad(of_params, has_aux=True)(params)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
        own, params = new["dropout_rng"], {"w": params["w"] - 0.1 * grads["w"]}


def test_an_old_style_key_keeps_its_shape_on_more_devices_than_it_has_entries():
    state, plan = gshard.shard_train_state(
        with_key(jax.random.PRNGKey(0)), mesh(3), "p_g_os", min_shard_size=0
    )
    assert state.params["w"].shape == (18,)  # padded
    assert state.dropout_rng.shape == (2,)
    jax.jit(jax.random.split)(state.dropout_rng)


def test_an_old_style_key_of_another_kind_is_named():
    _, plan = gshard.shard_train_state(plain(), mesh(), "os", min_shard_size=4)
    with pytest.raises(gshard.GShardError, match=r"uint32\[4\]; an old-style key .* impl="):
        make_train_step(lambda p, b, rng: 0.0, plan, rng=jax.random.PRNGKey(0, impl="rbg"))
