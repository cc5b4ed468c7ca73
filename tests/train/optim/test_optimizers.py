"""Every optimizer of optax trains as on one device: the same parameters after five steps.

The quick tier takes one of each kind, and one gradient for all of a group, along the way of plain
SGD, in the user's own loop. The slow one takes all of them so, and each alone by `make_train_step`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from tests.optimizers import KINDS, NOT_OPTIMIZERS, OPTIMIZERS, RATE, UNSUPPORTED, fast_alone
from tests.tiers import quick

LEVELS = ("dp", "os", "os_g", "p_g_os")
STEPS = 5
ROWS = 24
LEADER = 0.05  # learning rate of the plain SGD whose gradients a group shares

# Second moments of entries whose gradient is nearly zero make much of rounding.
LOOSE = {"acprop": 2e-4, "scale_by_acprop": 2e-4}


@functools.cache
def params() -> dict[str, np.ndarray]:
    """Matrices that divide and such that do not, a stack and a vector."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 13), "w2": (13, 24), "odd": (7, 5), "bias": (24,), "stack": (3, 16, 16)}
    return {k: (rng.normal(size=s) / 4).astype(np.float32) for k, s in shapes.items()}


def loss(p: Any, b: Any) -> jax.Array:
    x = b["x"]
    for w in p["stack"]:
        x = x + jnp.tanh(x @ w)
    logits = jnp.tanh(x @ p["w1"]) @ p["w2"] + p["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, b["y"])
    return losses.mean() + jnp.square(b["z"] @ p["odd"]).mean()


def batch(i: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + i)
    return {
        "x": rng.normal(size=(ROWS, 16)).astype(np.float32),
        "y": rng.integers(0, 24, ROWS).astype(np.int32),
        "z": rng.normal(size=(ROWS, 7)).astype(np.float32),
    }


def takes_value(tx: optax.GradientTransformation) -> bool:
    found = inspect.signature(tx.update).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in found)


@functools.cache
def one_device(names: tuple[str, ...]) -> dict[str, Any]:
    """Parameters after five steps of every optimizer, plain JAX, all in one program."""
    txs = {name: OPTIMIZERS[name]() for name in names}

    @jax.jit
    def step(states, rows):
        new = {}
        for name, tx in txs.items():
            p, s = states[name]
            value, grads = jax.value_and_grad(loss)(p, rows)
            extra = {"value": value} if takes_value(tx) else {}
            updates, s = tx.update(grads, s, p, **extra)
            new[name] = (optax.apply_updates(p, updates), s)
        return new

    states = {name: (params(), tx.init(params())) for name, tx in txs.items()}
    for i in range(STEPS):
        states = step(states, batch(i))
    return {name: jax.device_get(p) for name, (p, _) in states.items()}


def divided(names: tuple[str, ...], level: str, devices: int, **options: Any) -> dict[str, Any]:
    """The same, sharded: every step traced into one program."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    states, steps = {}, {}
    for name in names:
        states[name], plan = gshard.shard_train_state(
            (params(), OPTIMIZERS[name]()), mesh, level, min_shard_size=16, scan_axes={"stack": 0}
        )
        steps[name] = gshard.make_train_step(loss, plan, donate=False, **options)

    @jax.jit
    def step(states, rows):
        new = {}
        for name in names:
            new[name], metrics = steps[name](states[name], rows)
            # One after the other: XLA on CPU starts independent collectives in any order, and with
            # very many of them its devices can wait for one another for ever.
            rows = {**rows, "x": rows["x"] + 0 * metrics["grad_norm"]}
        return new

    for i in range(STEPS):
        states = step(states, batch(i))
    return {name: gshard.full_params(state) for name, state in states.items()}


@functools.cache
def updated_on_one_device(names: tuple[str, ...]) -> dict[str, Any]:
    """Parameters after five updates with the gradients that plain SGD meets."""
    txs = {name: OPTIMIZERS[name]() for name in names}

    @jax.jit
    def step(leader, states, rows):
        value, grads = jax.value_and_grad(loss)(leader, rows)
        new = {}
        for name, tx in txs.items():
            p, s = states[name]
            extra = {"value": value} if takes_value(tx) else {}
            updates, s = tx.update(grads, s, p, **extra)
            new[name] = (optax.apply_updates(p, updates), s)
        return jax.tree.map(lambda p, g: p - LEADER * g, leader, grads), new

    leader, states = params(), {name: (params(), tx.init(params())) for name, tx in txs.items()}
    for i in range(STEPS):
        leader, states = step(leader, states, batch(i))
    return {name: jax.device_get(p) for name, (p, _) in states.items()}


def updated(names: tuple[str, ...], level: str, devices: int) -> dict[str, Any]:
    """The same, sharded, in the user's own loop."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])

    def divide(tx: optax.GradientTransformation) -> Any:
        options = {"min_shard_size": 16, "scan_axes": {"stack": 0}}
        return gshard.shard_train_state((params(), tx), mesh, level, **options)

    leader, plan = divide(optax.sgd(LEADER))
    gradient = gshard.value_and_grad(loss, plan)
    states = {name: divide(OPTIMIZERS[name]())[0] for name in names}

    @jax.jit
    def step(leader, states, rows):
        value, grads = gradient(leader.params, rows)
        new = {}
        for name, state in states.items():
            updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=value)
            new[name] = state.replace(
                params=optax.apply_updates(state.params, updates), opt_state=opt_state
            )
        return leader.apply_gradients(grads=grads), new

    for i in range(STEPS):
        leader, states = step(leader, states, batch(i))
    return {name: gshard.full_params(state) for name, state in states.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = {}
    for name, tree in expected.items():
        largest = max(np.abs(x).max() for x in tree.values())
        errors = [np.abs(found[name][k] - tree[k]).max() for k in tree]
        error = float(np.max(errors) / largest)
        if not error <= LOOSE.get(name, 1e-5):
            wrong[name] = error
    assert not wrong


def parts_of(names: Any, size: int = 12) -> list[tuple[str, ...]]:
    names = tuple(names)
    return [names[i : i + size] for i in range(0, len(names), size)]


@pytest.mark.parametrize(
    ("names", "level"),
    quick(
        [*KINDS, *itertools.product(parts_of(OPTIMIZERS), ["os", "p_g_os"])],
        KINDS,
    ),
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_every_optimizer_updates_as_on_one_device(names, level):
    assert_same(updated(names, level, 4), updated_on_one_device(names))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "level", "devices"),
    [
        (names, level, devices)
        for i, names in enumerate(parts_of(OPTIMIZERS))
        for j, level in enumerate(LEVELS)
        for k, devices in enumerate((3, 8))
        if (i + j + k) % 2 == 0  # every pair of values of two of these meets
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else str(x),
)
def test_steps_of_every_optimizer_are_those_of_one_device(names, level, devices):
    micro_batches = 2 if devices == 3 else 1
    assert_same(divided(names, level, devices, micro_batches=micro_batches), one_device(names))


@pytest.mark.parametrize("level", quick(LEVELS, ["os"]))
@pytest.mark.parametrize("name", quick(["soap", "soap, every second step"], ["soap"]))
def test_a_step_that_may_be_skipped_factorises_its_state(name, level):
    """A QR reads what the guard selects, and products read its result."""
    assert_same(divided((name,), level, 8), one_device((name,)))


class Own:
    """An optimizer that is no tuple."""

    init = staticmethod(optax.adam(RATE).init)

    def update(self, grads, state, params=None):
        return optax.adam(RATE).update(grads, state, params)


def numbered():
    """Parts of its state are constants after an update, as in DoG."""

    def update(grads, state, params=None):
        del state, params
        return jax.tree.map(lambda g: -RATE * g, grads), {
            "last": 1,
            "first": jnp.asarray(False),
        }

    def init(params):
        del params
        return {"last": jnp.int32(0), "first": jnp.asarray(True)}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "make",
    [lambda: optax.MultiSteps(optax.adam(RATE), 2), Own, numbered],
)
def test_whatever_has_init_and_update_is_an_optimizer(make):
    tx = make()

    @jax.jit
    def alone(p, s, rows):
        updates, s = tx.update(jax.grad(loss)(p, rows), s, p)
        return optax.apply_updates(p, updates), s

    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    options = {"min_shard_size": 16, "scan_axes": {"stack": 0}}
    state, plan = gshard.shard_train_state((params(), tx), mesh, "os", **options)
    step = gshard.make_train_step(loss, plan)
    p, s = params(), tx.init(params())
    for i in range(STEPS):
        p, s = alone(p, s, batch(i))
        state, _ = step(state, batch(i))
    assert_same({"": gshard.full_params(state)}, {"": jax.device_get(p)})
    assert plan.unwrap(state).tx is tx
    with pytest.raises(gshard.GShardError, match="tuple of .dict, type"):  # the class itself
        gshard.shard_train_state((params(), type(tx)), mesh, "os")
    # A state of another object of the same class: the plan's is used, with a warning.
    other, _ = gshard.shard_train_state((params(), make()), mesh, "os", **options)
    with pytest.warns(gshard.GShardWarning, match="another optimizer"):
        step(other, batch(0))


def makes_a_transformation(f: Any) -> bool:
    """By its annotation, or its docstring where it has none, as optax.contrib.dog."""
    said = inspect.signature(f).return_annotation
    said = f.__doc__ if said is inspect.Signature.empty else said
    return "transformation" in str(said).lower()


def test_no_optimizer_of_optax_is_forgotten():
    public = {
        name
        for module in (optax, optax.contrib)
        for name, f in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(f) and makes_a_transformation(f)
    }
    known = {*OPTIMIZERS, *UNSUPPORTED, *NOT_OPTIMIZERS}
    assert public - known == set()
    assert not set(OPTIMIZERS) & set(UNSUPPORTED)


def test_pairs_of_lookahead_are_refused():
    pair = optax.LookaheadParams.init_synced(params())
    tx = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)
    with pytest.raises(gshard.GShardError, match='no gradient.*fast.*"The train step"'):
        gshard.shard_train_state((pair, tx), gshard.make_mesh(), "os")


@pytest.mark.slow
def test_slow_parameters_are_those_of_optax_and_are_sharded():
    """Against pairs, trained as optax's documentation does."""
    tx = optax.lookahead(optax.adam(RATE), sync_period=2, slow_step_size=0.5)
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    options = {"min_shard_size": 16, "scan_axes": {"stack": 0}}
    state, plan = gshard.shard_train_state((params(), fast_alone(tx)), mesh, "os", **options)
    step = gshard.make_train_step(loss, plan)

    @jax.jit
    def alone(pair, opt_state, rows):
        updates, opt_state = tx.update(jax.grad(loss)(pair.fast, rows), opt_state, pair)
        return optax.apply_updates(pair, updates), opt_state

    pair = optax.LookaheadParams.init_synced(params())
    opt_state = tx.init(pair)
    for i in range(STEPS):
        pair, opt_state = alone(pair, opt_state, batch(i))
        state, _ = step(state, batch(i))
    assert not state.opt_state.inner[1]["w1"].is_fully_replicated
    plain = plan.unwrap(state)
    found = optax.LookaheadParams(plain.params, plain.opt_state[1])
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(pair), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    assert np.abs(pair.slow["w1"] - pair.fast["w1"]).max() > 1e-3


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_supported_says_why(name):
    make, parts = UNSUPPORTED[name]
    state, plan = gshard.shard_train_state(
        (params(), make()), gshard.make_mesh(), "os", min_shard_size=16
    )
    with pytest.raises(gshard.GShardError) as error:
        gshard.make_train_step(loss, plan)(state, batch(0))
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_an_optimizer_whose_update_adds_to_its_state_trains_from_an_updated_one():
    tx = UNSUPPORTED["monitor"][0]()
    zeros = jax.tree.map(jnp.zeros_like, params())
    after = tx.update(zeros, tx.init(params()), params())[1]
    start = TrainState(step=0, apply_fn=None, params=params(), tx=tx, opt_state=after)
    state, plan = gshard.shard_train_state(start, gshard.make_mesh(), "os", min_shard_size=16)
    state, metrics = gshard.make_train_step(loss, plan)(state, batch(0))
    norm = plan.unwrap(state).opt_state[0].measurements["norm"]
    np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=1e-5)
