"""Unusual arrays, most of which are taken although similar ones are refused (`tests/misuses`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
PARAMS = {"w": np.ones((16, 8), np.float32), "b": np.zeros(8, np.float32)}


def loss(p: Any, b: Any) -> jax.Array:
    return ((b["x"] @ p["w"] + p["b"]) ** 2).mean()


def shard(params: Any) -> Any:
    pair = (params, optax.sgd(0.1))
    return gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=8)


def test_what_fits_is_taken():
    """64-bit integers of small numbers, in the state and in the batch."""
    state, plan = shard({**PARAMS, "id": np.array([2**31 - 1, -(2**31)])})
    batch = {"x": np.ones((16, 16), np.float32), "id": np.full(16, 2**31 - 1)}
    state, _ = gshard.make_train_step(loss, plan, check_loss=False)(state, batch)
    assert gshard.full_params(state)["id"].tolist() == [2**31 - 1, -(2**31)]


def test_an_abstract_state_lowers():
    state, plan = shard(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS))
    step = gshard.make_train_step(loss, plan)
    assert step.lower(state, {"x": jax.ShapeDtypeStruct((16, 16), np.float32)}).as_text()


class Tabled(nnx.Module):
    """With arrays that are in no Variable."""

    def __init__(self, table: Any):
        self.w, self.table, self.scale = nnx.Param(jnp.ones((16, 8))), table, np.full(8, 2.0)

    def __call__(self, x: Any) -> jax.Array:
        return x @ self.w[...] * self.scale + self.table


def pair(table: Any) -> Any:
    model = Tabled(table())
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def test_arrays_of_a_model_that_are_in_no_variable():
    """Of 64 bits, as NumPy makes them; and made by an init function, which is traced."""

    def measure(model: Any, b: Any) -> jax.Array:
        return (model(b["x"]) ** 2).mean()

    mesh, batch = gshard.make_mesh(), {"x": np.ones((16, 16), np.float32)}
    for state in (pair(lambda: np.arange(8)), lambda: pair(lambda: nnx.data(jnp.arange(8)))):
        (model, optimizer), plan = gshard.shard_train_state(state, mesh, "os", min_shard_size=8)
        step = gshard.make_train_step(measure, plan)
        found = [float(step(model, optimizer, batch)["loss"]) for _ in range(2)]
        assert found[0] == pytest.approx(np.mean((16 * 2 + np.arange(8)) ** 2))
        assert found[1] < found[0]
    with pytest.raises(gshard.GShardError, match="attribute table is .* nnx.data"):
        gshard.shard_train_state(lambda: pair(lambda: jnp.arange(8)), mesh, "os")


def test_a_masked_node_next_to_frozen_parameters():
    params = {**PARAMS, "gap": optax.MaskedNode()}
    state, plan = gshard.shard_train_state(
        (params, optax.adam(0.1)), gshard.make_mesh(), "os", min_shard_size=8, frozen="b"
    )
    state, _ = gshard.make_train_step(loss, plan)(state, {"x": np.ones((16, 16), np.float32)})
    full = gshard.full_params(state)
    assert full["gap"] == optax.MaskedNode() and not full["b"].any() and full["w"].max() < 1


@pytest.mark.parametrize("step", [np.zeros(1, np.int32), 3.0, True])
def test_a_step_that_is_not_an_integer_is_refused(step: Any):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1)).replace(step=step)
    with pytest.raises(gshard.GShardError, match="state.step is .* an integer scalar"):
        gshard.shard_train_state(state, gshard.make_mesh(), "os")


def test_numbers_that_are_put_into_fields_between_steps():
    class State(TrainState):
        flag: Any = None
        factor: Any = None

    def scaled(p: Any, b: Any, *, flag: Any, factor: Any) -> jax.Array:
        return jnp.where(flag, factor.real * loss(p, b), 0)

    state = State.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.0), flag=True, factor=1 + 1j)
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=8)
    step, batch = gshard.make_train_step(scaled, plan), {"x": np.ones((16, 16), np.float32)}
    found = []
    for flag, factor in ((True, 1 + 1j), (False, 2 + 0j), (np.bool_(True), np.complex64(2))):
        state, metrics = step(state.replace(flag=flag, factor=factor), batch)
        found.append(float(metrics["loss"]))
    assert found == [256, 0, 512]
    with pytest.raises(gshard.GShardError, match="flag is a int, stored as bool"):
        step(state.replace(flag=1), batch)


def test_a_state_of_devices_in_another_order():
    state, plan = shard(PARAMS)
    mesh = gshard.make_mesh(devices=jax.devices()[::-1])
    _, plan = gshard.shard_train_state((PARAMS, plan.tx), mesh, "os", min_shard_size=8)
    with pytest.raises(gshard.GShardError, match=r"P\(\) of another mesh: other devices"):
        gshard.make_train_step(loss, plan)(state, {"x": np.ones((16, 16), np.float32)})
