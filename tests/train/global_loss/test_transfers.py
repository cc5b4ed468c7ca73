"""What a loss communicates is in the budget of its step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

EXAMPLES, FEATURES = 16, 8
X = np.random.default_rng(0).normal(size=(EXAMPLES, FEATURES)).astype(np.float32)


def contrastive(params, x):
    z = x @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def rmse(params, x):
    return jnp.sqrt(jnp.mean((x @ params["w"]) ** 2))


def masked(params, x):
    return jnp.mean(x @ params["w"], where=x > 0)


def mixed(params, x):
    order = jax.random.permutation(jax.random.key(0), len(x))
    return jnp.square((x + x[order]) @ params["w"]).mean()


def step_of(loss, **options):
    params = {"w": np.eye(FEATURES, dtype=np.float32)}
    pair = params, optax.sgd(1.0)
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "p_g_os", min_shard_size=8)
    step = gshard.make_train_step(loss, plan, **options)
    step.lower(state, X)
    return step, state


GATHERED = EXAMPLES * FEATURES


@pytest.mark.parametrize(
    "loss, kind, rows",
    [
        (contrastive, "gather", [("all-gather", GATHERED, 4 * GATHERED * 7 // 8)]),
        (rmse, "sum", [("all-reduce", 1, 2 * 4 * 7 // 8)]),
        (masked, "", []),
    ],
)
def test_the_budget_has_what_the_loss_communicates(loss, kind, rows):
    step, _ = step_of(loss)
    assert [(x.kind, x.elements, x.size) for x in step.loss_transfers] == [
        (kind, elements, 4 * elements) for _, elements, _ in rows
    ]
    alone = gshard.budget(step.plan)
    found = gshard.budget(step.plan, loss_transfers=step.loss_transfers)
    assert found == step.budget
    of_loss = [x for x in found.communicated if x.purpose == "loss"]
    assert [(x.kind, x.elements, x.wire_bytes) for x in of_loss] == rows
    assert alone.communicated == tuple(x for x in found.communicated if x.purpose != "loss")
    assert found.wire_bytes == alone.wire_bytes + sum(x.wire_bytes for x in of_loss)


def test_the_budget_of_a_step_that_was_not_traced_says_so():
    pair = {"w": jnp.ones(8)}, optax.sgd(1.0)
    _, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "dp")
    step = gshard.make_train_step(lambda params, x: params["w"].mean(), plan)
    with pytest.raises(gshard.GShardError, match=r"Call it, or step\.lower"):
        gshard.budget(plan, loss_transfers=step.loss_transfers)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_budget_is_what_the_program_communicates(micro_batches):
    """Of a gather that is not differentiated, in every micro-batch."""
    options = {"micro_batches": micro_batches, "loss_semantics": "per_micro_batch"}
    step, state = step_of(mixed, **options)
    found = gshard.audit(step, state, X)
    gathers = [x for x in found.collectives if (x.kind, x.purpose) == ("all-gather", "loss")]
    assert sum(x.elements for x in gathers) == GATHERED
    (row,) = (x for x in found.budget.communicated if x.purpose == "loss")
    assert (row.kind, row.elements) == ("all-gather", GATHERED)
    assert row.wire_bytes == sum(x.wire_bytes for x in gathers)
