"""Optimizers that evaluate the loss: L-BFGS, a line search and Sophia, in the user's own loop."""

from __future__ import annotations

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


def arguments(name: str, value: Any, grads: Any, function: Any) -> dict[str, Any]:
    if name == "sophia":
        return {"obj_fn": function}
    return {"value": value, "grad": grads, "value_fn": function}


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
        updates, state = tx.update(grads, state, p, **arguments(name, value, grads, of_trained))
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
        given = arguments(name, value, grads, lambda p: value_and_grad(p, b)[0])
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
    assert expected[-1] < 0.9 * expected[0]
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
