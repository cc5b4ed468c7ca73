"""A loss whose gradient reaches no trained parameter is refused; every other one is not."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
OWN = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
BATCH = np.ones((16, 16), np.float32)


def good(p: Any, b: Any) -> jax.Array:
    return jnp.mean((b @ p["w"] + p["b"]) ** 2)


def closes_over(p: Any, b: Any) -> jax.Array:
    return good(OWN, b)


def scanned(p: Any, b: Any) -> jax.Array:
    return jax.lax.scan(lambda c, x: (c + good(p, x[None]), None), 0.0, b)[0] / b.shape[0]


IGNORING = {
    "closes over": closes_over,
    "jitted": jax.jit(lambda p, b: (p["w"].sum(), closes_over(p, b))[1]),
    "no number of theirs": lambda p, b: jnp.mean(b) * p["w"].shape[0],
    "stopped": lambda p, b: good(jax.lax.stop_gradient(p), b),
    "weighted": lambda p, b: gshard.Weighted(closes_over(p, b) * len(b), jnp.float32(len(b))),
    "partial": functools.partial(lambda scale, p, b: scale * closes_over(p, b), 2.0),
}
READING = {
    "one of two": lambda p, b: jnp.mean(b) * jnp.sum(p["b"]),
    "jitted": jax.jit(good),
    "rematerialized": jax.checkpoint(good),
    "scanned": scanned,
    "where": lambda p, b: jnp.where(jnp.mean(b) > 0, 0.0, good(p, b)),
    "zero": lambda p, b: 0 * good(p, b),
    "weighted": lambda p, b: gshard.Weighted(good(p, b) * len(b), jnp.float32(len(b))),
}


def sharded(level: str, frozen: str | None = None) -> Any:
    options = {"min_shard_size": 4, "frozen": frozen}
    return gshard.shard_train_state((OWN, optax.adam(1e-2)), gshard.make_mesh(), level, **options)


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(IGNORING, LEVELS),
        [*zip(IGNORING, [*LEVELS, "os", "p_g_os"], strict=True)],
    ),
)
def test_a_loss_that_ignores_its_parameters_is_refused(name, level):
    state, plan = sharded(level)
    step = gshard.make_train_step(IGNORING[name], plan, check_loss=False)
    with pytest.raises(gshard.GShardError, match="the loss .*does not depend on") as error:
        step(state, BATCH)
    assert "test_loss_reach.py:" in str(error.value) and "frozen=" in str(error.value)
    for x in jax.tree.leaves(state.params):
        assert not x.is_deleted()


@pytest.mark.parametrize("semantics", ["per_device", "global", "per_micro_batch"])
@pytest.mark.parametrize("sync", [True, False])
def test_your_own_loop_too(sync, semantics):
    state, plan = sharded("p_g_os")
    grad = gshard.value_and_grad(closes_over, plan, sync=sync, loss_semantics=semantics)
    with pytest.raises(gshard.GShardError, match="closes_over .*test_loss_reach.py:"):
        jax.jit(grad)(state.params, BATCH)


@pytest.mark.parametrize(
    ("name", "level", "micro_batches", "semantics"),
    quick(
        [
            case
            for case in itertools.product(READING, LEVELS, [1, 2], ["per_device", "global"])
            if (case[0], *case[2:])
            != ("scanned", 2, "global")  # refused: the scan is over examples
        ],
        [(name, "p_g_os", 1, "per_device") for name in READING]
        + [(name, "os", 1, "global") for name in READING if name != "rematerialized"]
        + [("one of two", "dp", 2, "per_device"), ("one of two", "os_g", 1, "global")],
    ),
)
def test_a_loss_that_reads_any_is_taken(name, level, micro_batches, semantics):
    state, plan = sharded(level)
    step = gshard.make_train_step(
        READING[name],
        plan,
        check_loss=False,
        micro_batches=micro_batches,
        loss_semantics=semantics,
    )
    state, metrics = step(state, BATCH)
    assert np.isfinite(metrics["loss"])


def test_nnx_aux_and_frozen():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    (model, optimizer), plan = gshard.shard_train_state(
        pair, gshard.make_mesh(), "os", min_shard_size=4
    )

    def with_aux(m: Any, b: Any) -> Any:
        return jnp.mean(b), {"mean": jnp.mean(m(b))}

    step = gshard.make_train_step(with_aux, plan, has_aux=True, check_loss=False)
    with pytest.raises(gshard.GShardError, match="with_aux .*does not depend on"):
        step(model, optimizer, BATCH)
    state, plan = sharded("os", frozen="^w$")
    step = gshard.make_train_step(lambda p, b: jnp.mean(b @ p["w"]), plan, check_loss=False)
    with pytest.raises(gshard.GShardError, match="does not depend on"):
        step(state, BATCH)  # only of what is frozen


def test_a_state_without_parameters_has_none_to_reach():
    state, plan = gshard.shard_train_state(({}, optax.adam(1e-2)), gshard.make_mesh(), "os")
    step = gshard.make_train_step(lambda p, b: jnp.mean(b), plan, check_loss=False)
    assert float(step(state, BATCH)[1]["loss"]) == 1
