"""Plans that do not split the examples: one device, or axes of other kinds alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.tiers import quick

pytestmark = pytest.mark.filterwarnings("ignore:no parameter is sharded over mesh axes")
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 4)).astype(np.float32)}
X = RNG.normal(size=(6, 4, 3)).astype(np.float32)
MASK = np.array([1, 0, 0, 1, 1, 1], np.float32)
MESHES: dict[str, Any] = {
    "one device": ({}, 1),
    "a sequence axis": ({"sequence": 2}, 2),
    "an axis of another kind": ({"extra": {"model": 2}}, 2),
    "kept on an expert axis": ({"expert": 2}, 2),
    "2 devices": ({}, 2),  # which do, for comparison
}
on_meshes = pytest.mark.parametrize("mesh", quick(MESHES, ["one device", "a sequence axis"]))


def loss_fn(p: Any, b: Any) -> Any:
    """A masked mean over examples, and how many there are."""
    y = jnp.square(jnp.tanh(b["x"] @ p["w"])).mean((1, 2))
    mean = (y * b["mask"]).sum() / b["mask"].sum()
    return mean, {"count": (b["mask"] > 0).sum()}


def sharded(name: str) -> Any:
    how, n = MESHES[name]
    keep = {"w": ("expert", 1)} if "expert" in how else None
    mesh = gshard.make_mesh(devices=jax.devices()[:n], **how)
    given = PARAMS, optax.sgd(0.1)
    return gshard.shard_train_state(given, mesh, "p_g_os", min_shard_size=0, keep=keep)


def given(mask: np.ndarray = MASK) -> dict[str, np.ndarray]:
    return {"x": X, "mask": mask}


@on_meshes
def test_calls_of_a_masked_mean_are_one_batch(mesh):
    """The two calls have different numbers of examples that count."""
    state, plan = sharded(mesh)
    call = gshard.value_and_grad(loss_fn, plan, sync=False, has_aux=True)

    @jax.jit
    def both(p: Any, one: Any, other: Any) -> Any:
        return gshard.reduce_gradients(call(p, one)[1] + call(p, other)[1], plan)

    halves = ({name: x[i : i + 2] for name, x in given().items()} for i in (0, 2))
    fewer = {name: x[:4] for name, x in given().items()}
    (loss, aux), grads = both(state.params, *halves)
    wanted, expected = jax.value_and_grad(loss_fn, has_aux=True)(PARAMS, fewer)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(grads["w"][:3, :4], expected["w"], rtol=1e-5, atol=1e-7)
    assert aux["count"] == wanted[1]["count"] == 2


@on_meshes
def test_counts_of_micro_batches_are_added(mesh):
    state, plan = sharded(mesh)
    options = {"micro_batches": 3, "loss_semantics": "per_micro_batch", "has_aux": True}
    (_, aux), _ = jax.jit(gshard.value_and_grad(loss_fn, plan, **options))(state.params, given())
    assert aux["count"] == 4


@on_meshes
def test_a_batch_without_valid_examples_is_skipped(mesh):
    state, plan = sharded(mesh)
    step = gshard.make_train_step(loss_fn, plan, has_aux=True)
    state, metrics = step(state, given(np.zeros_like(MASK)))
    assert metrics["loss"] == 0 and metrics["skipped_steps"] == 1


def test_one_device_communicates_nothing():
    """What needs all examples at once has them."""

    def loss(p: Any, b: Any) -> jax.Array:
        y = jnp.tanh(b["x"] @ p["w"]).mean(1)
        rows = y[2:4].mean() + jnp.cumsum(y, 0).mean() + jnp.sort(y, 0)[:3].mean()
        return loss_fn(p, b)[0] + y.max() + y.std(0).mean() + rows + (y @ y.T).max(1).mean()

    state, plan = sharded("one device")
    traced = jax.jit(gshard.value_and_grad(loss, plan)).trace(state.params, given())
    assert not any(f"{name}[" in str(traced.jaxpr) for name in ("psum", "pmax", "all_gather"))
    found, wanted = traced.lower().compile()(state.params, given()), loss(PARAMS, given())
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)
