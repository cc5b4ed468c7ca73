"""Sums of integers that become floats: without a collective where they cannot overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gshard
from tests.train.global_loss.placed import (
    Case,
    Placed,
    booleans,
    check,
    check_free,
    integers,
    placements,
)

F32 = jnp.float32
MASK, LABELS = booleans(12), integers(12, high=5)
BYTES, WORDS = integers(12, high=256, dtype=np.uint8), integers(12, high=2**15, dtype=np.int16)
LARGE = integers(12, high=2**30)
UNSIGNED = LARGE.astype(np.uint32)


def product(x, dtype):
    """With a matrix of ones, in another dtype."""
    numbers = (((0,), (0,)), ((), ()))
    ones = jnp.ones((1, 2), x.dtype)
    return lax.dot_general(
        x.sum(keepdims=True, dtype=x.dtype), ones, numbers, preferred_element_type=dtype
    )


COUNTS = {
    "booleans": (MASK, lambda x: x.sum()),
    "signed bytes": (BYTES.astype(np.int8), lambda x: x.sum()),
    "bytes": (BYTES, lambda x: x.sum()),
    "bytes as signed": (BYTES, lambda x: x.astype(jnp.int32).sum()),
    "short integers": (WORDS, lambda x: x.sum()),
    "chosen": (MASK, lambda x: jnp.where(x, 3, 1).sum()),
    "multiplied": (MASK, lambda x: (x.sum() * -7 + 3) - x.sum()),
    "negative": (MASK, lambda x: -x.sum()),
    "classes": (LABELS, lambda x: jax.nn.one_hot(x, 5, dtype=jnp.int32).sum(0)),
    "confusion": (LABELS, lambda x: (x[:, None] == jnp.arange(5)).sum(0).reshape(5, 1).T),
    "bins": (LABELS, lambda x: jnp.bincount(x, length=5)),
    "along": (LABELS, lambda x: jnp.cumsum((x[:, None] == jnp.arange(5)).sum(0))),
    "joined": (MASK, lambda x: jnp.concatenate([x.sum(keepdims=True), (~x).sum(keepdims=True)])),
    "products": (MASK, lambda x: x.astype(jnp.int32) @ (jnp.arange(12) > 3).astype(jnp.int32)),
    "positions": (MASK, lambda x: jnp.where(x, jnp.arange(12), 0).sum()),
    "larger": (MASK, lambda x: jnp.maximum(x.astype(jnp.int32), 2).sum()),
    "unsigned": (MASK, lambda x: x.astype(jnp.uint32).sum()),
    "few in bfloat16": (MASK, lambda x: x.sum().astype(jnp.bfloat16)),
}
OVERFLOW = {
    "integers": (LARGE, lambda x: x.sum()),
    "unsigned": (UNSIGNED, lambda x: x.sum()),
    "below zero": (MASK, lambda x: 3 - x.astype(jnp.uint32).sum()),
    "negative": (MASK, lambda x: -x.astype(jnp.uint32).sum()),
    "negative unsigned": (MASK, lambda x: (x.astype(jnp.int32) - 1).astype(jnp.uint32).sum()),
    "multiplied": (MASK, lambda x: x.sum() * 2**29),
    "multiplied before": (WORDS, lambda x: (x.astype(jnp.int32) * 2**16).sum()),
    "many in bfloat16": (WORDS, lambda x: x.astype(jnp.int32).sum().astype(jnp.bfloat16)),
    "in bytes": (BYTES, lambda x: x.sum(dtype=jnp.uint8)),
    "narrower": (LARGE, lambda x: x.astype(jnp.int8).sum(dtype=jnp.int8)),
    "chosen": (LARGE, lambda x: jnp.where(x > 7, x, 1).sum()),
    "bins": (LARGE, lambda x: jnp.zeros(5, x.dtype).at[x % 5].add(x)),
    "many in a bin": (MASK, lambda x: jnp.full(2, 2**31 - 3).at[x.astype(int)].add(1)),
    "along": (MASK, lambda x: jnp.cumsum(jnp.stack([x.sum() * 2**27] * 4))),
    "product": (LARGE, lambda x: product(x, F32)),
    "product of bytes": (BYTES.astype(np.int8), lambda x: product(x, jnp.int32)),
    "loop": (LARGE, lambda x: lax.scan(lambda c, _: (c * 1.5, x.sum() / 7), 1.0, None, 2)[1]),
}


def as_float(name: str, table: dict[str, Any]) -> Case:
    x, f = table[name]
    return Case(name, lambda x: f(x).astype(F32), [x], "0 > P", like=1e-6, grads=False)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_needs_no_collective(name):
    case = as_float(name, COUNTS)
    check(case.f, case.args, case.ways(3), 3, case.like, grads=False)
    check_free(case)


@pytest.mark.parametrize("name", OVERFLOW)
def test_a_sum_that_may_overflow_is_completed_first(name):
    case = as_float(name, OVERFLOW)
    check(case.f, case.args, case.ways(3), 3, case.like, grads=False)
    placed = Placed(case.f, case.args, 3)
    placed.held(case.args, placements("0"))
    assert placed.transfers


BATCH = {
    "x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    "ids": integers(32, high=2**30),
    "y": integers(32, high=5),
}


def by_ids(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"]).mean() * (batch["ids"].sum() / 2.0**31)


def by_count(params: Any, batch: Any) -> Any:
    losses, counted = batch["x"] @ params["w"], batch["y"] > 1
    return jnp.sum(losses, where=counted) / counted.sum()


def by_loop(params: Any, batch: Any) -> Any:
    """A count that begins as a Python number: the loop converts it, to the same dtype."""
    count, _ = lax.scan(lambda c, i: (c + (batch["y"] == i).sum(), None), 0, jnp.arange(4))
    return jnp.sum(batch["x"] @ params["w"]) / count


def weighted(params: Any, batch: Any) -> Any:
    return gshard.Weighted(jnp.sum(batch["x"] @ params["w"]), batch["ids"].sum())


def weighted_output(params: Any, batch: Any) -> Any:
    x = batch["x"] @ params["w"]
    return x.mean(), gshard.Weighted(x.sum() / 2, batch["ids"].sum())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_weight_of_an_output_may_overflow(micro_batches):
    params = {"w": np.ones(8, np.float32)}
    pair = params, optax.sgd(1.0)
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "dp")
    options = {"has_aux": True, "micro_batches": micro_batches}
    _, metrics = gshard.make_train_step(weighted_output, plan, **options)(state, BATCH)
    _, wanted = jax.jit(weighted_output)(params, BATCH)
    np.testing.assert_allclose(metrics["aux"], wanted.sum / wanted.weight, rtol=1e-5)


def quotient(params: Any, batch: Any) -> Any:
    found = weighted(params, batch)
    return found.sum / found.weight


@pytest.mark.parametrize("level", ["dp", "p_g_os"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    "loss, plain, sums",
    [(by_ids, by_ids, 1), (by_count, by_count, 0), (by_loop, by_loop, 1), (weighted, quotient, 1)],
    ids=["ids", "count", "loop", "weighted"],
)
def test_steps_are_those_of_one_device(loss, plain, sums, micro_batches, level):
    params = {"w": np.ones(8, np.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(1.0)), gshard.make_mesh(), level, min_shard_size=1
    )
    step = gshard.make_train_step(loss, plan, micro_batches=micro_batches)
    state, metrics = step(state, BATCH)
    value, grads = jax.jit(jax.value_and_grad(plain))(params, BATCH)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    found = plan.unwrap(state).params["w"]
    np.testing.assert_allclose(found, params["w"] - grads["w"], rtol=1e-5)
    wanted = [("sum", 4)] * sums if micro_batches == 1 else []
    assert [(x.kind, x.size) for x in step.loss_transfers] == wanted
