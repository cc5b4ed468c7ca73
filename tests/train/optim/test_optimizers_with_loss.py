"""Optimizers that evaluate the loss: L-BFGS, a line search, Sophia and SAM, in an own loop."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.tiers import quick

STEPS, ROWS = 4, 840  # rows that 3, 5, 7 and 8 devices divide
OPTIMIZERS = {
    "lbfgs": optax.lbfgs(memory_size=3),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
    "sophia": optax.contrib.sophia(1e-2),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True),
}
CASES = [
    (name, level, devices, frozen)
    for name in OPTIMIZERS
    for level, devices in [("os", 5), ("os_g", 3), ("p_g_os", 7), ("p_g_os", 8)]
    for frozen in (None, "^first/")
]


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    first, last = rng.normal(size=(12, 33)) / 4, rng.normal(size=(33, 5)) / 6
    return {
        "first": {"w": first.astype(np.float32), "b": np.zeros(33, np.float32)},
        "last": {"w": last.astype(np.float32)},
    }


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(ROWS, 12)), rng.normal(size=(ROWS, 5))
    return {"x": (x * np.linspace(0.2, 3, ROWS)[:, None]).astype("f4"), "y": y.astype("f4")}


def loss(p: Any, b: Any) -> jax.Array:
    hidden = jnp.tanh(b["x"] @ p["first"]["w"] + p["first"]["b"])
    return jnp.mean((hidden @ p["last"]["w"] - b["y"]) ** 2)


def arguments(name: str, value: Any, grads: Any, function: Any, grad: Any) -> dict[str, Any]:
    if name == "sophia":
        return {"obj_fn": function}
    if name == "sam":
        return {"grad_fn": lambda p, i: grad(p)}
    return {"value": value, "grad": grads, "value_fn": function}


@functools.cache
def on_one_device(name: str, frozen: str | None) -> tuple[list[float], Any]:
    """The losses and the parameters; of frozen ones the optimizer sees nothing."""
    tx, b = OPTIMIZERS[name], batch()
    fixed = {"first": params()["first"]} if frozen else {}
    trained = {k: x for k, x in params().items() if k not in fixed}
    state, losses = tx.init(trained), []

    def of_trained(p: Any) -> jax.Array:
        return loss({**fixed, **p}, b)

    @jax.jit
    def step(p: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(of_trained)(p)
        given = arguments(name, value, grads, of_trained, jax.grad(of_trained))
        updates, state = tx.update(grads, state, p, **given)
        return optax.apply_updates(p, updates), state, value

    for _ in range(STEPS):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    return losses, {**fixed, **trained}


def sharded(name: str, level: str, devices: int, **options: Any) -> tuple[list[float], Any]:
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state(
        (params(), OPTIMIZERS[name]), mesh, level, min_shard_size=0, **options
    )
    value_and_grad, losses = gshard.value_and_grad(loss, plan), []

    @jax.jit
    def step(state: Any, b: Any) -> Any:
        value, grads = value_and_grad(state.params, b)
        functions = [lambda p, i=i: value_and_grad(p, b)[i] for i in (0, 1)]
        given = arguments(name, value, grads, *functions)
        updates, new = state.tx.update(grads, state.opt_state, state.params, **given)
        after = optax.apply_updates(state.params, updates)
        return state.replace(params=after, opt_state=new, step=state.step + 1), value

    for _ in range(STEPS):
        state, value = step(state, gshard.shard_batch(batch(), plan))
        losses.append(float(value))
    return losses, gshard.full_params(state)


@pytest.mark.parametrize(
    ("name", "level", "devices", "frozen"),
    quick(CASES, [("lbfgs", "p_g_os", 7, "^first/"), ("sophia", "os_g", 3, None)]),
)
def test_they_train_as_on_one_device(name, level, devices, frozen):
    options = {} if frozen is None else {"frozen": frozen}
    losses, found = sharded(name, level, devices, **options)
    expected, wanted = on_one_device(name, frozen)
    assert expected[-1] < 0.95 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_master_copies(name):
    losses, found = sharded(name, "p_g_os", 7, precision="bfloat16")
    expected, _ = on_one_device(name, None)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(found))


def padded(params: Any, update: Any) -> tuple[Any, gshard.Plan]:
    """A state on three devices at zero3, and an optimizer that is an `update` alone."""
    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    return gshard.shard_train_state((params, tx), mesh, "zero3", min_shard_size=0)


class Problem:
    """A function with a method."""

    def __call__(self, count):
        return 0.1 * count

    def name(self):
        return "a"


def test_other_arguments_are_as_given():
    """Of parameters that are one array, whose shape others may have: 7 entries, stored as 9."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append({**extra, "rate": extra["rate"](2), "name": extra["rate"].name()})
        seen[0]["given"] = extra["of_all"](params, rows=extra["rows"], short=jnp.ones(7))
        return -extra["rate"](3) * updates, state

    state, plan = padded(jnp.ones(7), update)
    given = {"names": {"a": 1, 2: "b"}, "like": jnp.ones(4), "rows": jnp.arange(9.0)}
    functions = {"rate": Problem(), "of_all": lambda *args, **by_name: [*args, by_name]}
    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, _ = state.tx.update(
        grads, state.opt_state, state.params, grad=grads, **functions, **given
    )
    np.testing.assert_allclose(plan.unwrap(state).params + np.asarray(updates)[:7], 0.7)
    (found,) = seen
    assert all(found[name] is x for name, x in given.items())
    assert found["rate"] == 0.2 and found["name"] == "a" and found["grad"].shape == (7,)
    params, by_name = found["given"]
    assert params.shape == (9,) and by_name["rows"] is given["rows"]
    assert by_name["short"].shape == (7,)


def test_gradients_within_a_tuple_are_converted():
    def update(updates, state, params=None, *, value_and_grad_fn):
        value, (grads, _) = value_and_grad_fn(params)
        return jax.tree.map(lambda u, g: -(u + value * g), updates, grads), state

    state, plan = padded({"w": jnp.ones((7, 5))}, update)

    def function(p):
        assert p["w"].shape == (7, 6)  # as it is stored
        return 2.0, [jax.tree.map(jnp.ones_like, p), None]

    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, _ = state.tx.update(grads, state.opt_state, state.params, value_and_grad_fn=function)
    np.testing.assert_array_equal(np.asarray(updates["w"])[:, :5], -3 * np.ones((7, 5)))


@jax.tree_util.register_dataclass
@dataclass
class Model:
    """Parameters that can be called, as those of Equinox can."""

    w: Any

    def __call__(self, x):
        return x @ self.w


def test_parameters_that_can_be_called_are_no_functions():
    def update(updates, state, params=None, *, grad):
        assert isinstance(grad, Model)
        return jax.tree.map(lambda u, g: -(u + g), updates, grad), state

    state, _ = padded(Model(jnp.ones((7, 5))), update)
    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, _ = state.tx.update(grads, state.opt_state, state.params, grad=grads)
    np.testing.assert_array_equal(np.asarray(updates.w)[:, :5], -2 * np.ones((7, 5)))
