"""The optimizer state that `shard_train_state` makes of `(params, tx)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import gshard
from gshard.train_state.initial import initial

PARAMS = {"w": np.full((24, 40), 0.3, np.float32), "b": jnp.ones(7, jnp.bfloat16)}


def with_python_values() -> optax.GradientTransformation:
    """An optimizer whose state has a value that no trace knows."""

    def init(params: Any) -> Any:
        return {"largest": float(jnp.max(params["w"]))}

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def with_weak_types() -> optax.GradientTransformation:
    """An optimizer whose state takes the dtype of what it is multiplied with."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.adafactor(1e-3),
        optax.adagrad(1e-3),  # its first values are not zeros
        optax.lbfgs(),
        optax.contrib.schedule_free_adamw(1e-3),  # a copy of the parameters
        optax.inject_hyperparams(optax.adam)(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
        with_python_values(),
        with_weak_types(),
    ],
)
def test_it_is_what_init_makes(tx: Any) -> None:
    found, expected = initial(tx, PARAMS), tx.init(PARAMS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_moments_take_no_memory_and_are_on_no_device() -> None:
    moments = initial(optax.adamw(1e-3), PARAMS)[0]
    for x in jax.tree.leaves((moments.mu, moments.nu)):
        assert isinstance(x, np.ndarray) and not any(x.strides)


def test_moments_of_sharded_parameters_are_sharded_alike() -> None:
    sharding = NamedSharding(gshard.make_mesh(), jax.P(None, "shard"))
    params = {"w": jax.device_put(PARAMS["w"], sharding)}
    moments = initial(optax.adamw(1e-3), params)[0]
    assert moments.mu["w"].sharding == moments.nu["w"].sharding == sharding
