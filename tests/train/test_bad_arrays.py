"""Arrays that look like those that are refused (`tests/misuses`), and are taken."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

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
