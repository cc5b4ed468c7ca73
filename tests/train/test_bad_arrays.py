"""Arrays that look like those that are refused (`tests/misuses`), and are taken."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import gshard

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
BATCH = np.ones((16, 16), np.float32)


def params(width: int = 8) -> dict[str, Any]:
    return {"w": np.ones((16, width), np.float32), "b": np.zeros(width, np.float32)}


def loss(p: Any, b: Any) -> jax.Array:
    b = b["x"] if isinstance(b, dict) else b
    return ((b @ p["w"] + p["b"]) ** 2).mean()


def shard(state: Any, level: Any = "os") -> Any:
    return gshard.shard_train_state(state, gshard.make_mesh(), level, min_shard_size=8)


def train(state: Any, batch: Any = BATCH, level: Any = "os") -> Any:
    state, plan = shard(state, level)
    return gshard.make_train_step(loss, plan, check_loss=False)(state, batch)


def plain(**more: Any) -> Any:
    return {**params(), **more}, optax.sgd(0.1)


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())


def abstract() -> Any:
    return shard((ABSTRACT, optax.sgd(0.1)))


def test_what_fits_is_taken():
    """64-bit integers of small numbers, in the state and in the batch."""
    state, _ = train(
        plain(id=np.array([2**31 - 1, -(2**31)])), {"x": BATCH, "id": np.full(16, 2**31 - 1)}
    )
    assert gshard.full_params(state)["id"].tolist() == [2**31 - 1, -(2**31)]


def test_an_abstract_state_lowers():
    state, plan = abstract()
    step = gshard.make_train_step(loss, plan)
    assert step.lower(state, jax.ShapeDtypeStruct((16, 16), np.float32)).as_text()
