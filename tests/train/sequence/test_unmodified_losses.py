"""Losses that are written for one device, with sequences that are sharded over devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gshard
from tests.tiers import quick
from tests.train.sequence.models import (
    PARTS,
    REDUCED,
    Model,
    assert_gradients,
    batch,
    init,
    loss_of,
    losses,
    sharded,
)

pytestmark = pytest.mark.filterwarnings("ignore:no parameter is sharded over mesh axes")
MESHES = [
    {"sequence": 2},
    {"sequence": 4},
    {"sequence": 8},
    {"sequence": 2, "replica": 2},
    {"sequence": 3, "devices": 3},
    {"sequence": 3, "devices": 6},
    {"sequence": 2, "extra": {"model": 2}},
]


def check(model, reduced="mean", semantics="global", micro_batches=1, **how):
    loss, params = loss_of(model, reduced), init(model)
    state, plan = sharded(params, **how)
    options = {"loss_semantics": semantics, "micro_batches": micro_batches}
    found = jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, batch())
    assert_gradients(loss, params, found)


@pytest.mark.parametrize("level", quick(["dp", "os", "os_g", "p_g_os"], ["p_g_os"]))
@pytest.mark.parametrize("mesh", quick(MESHES, [MESHES[1], MESHES[5]]), ids=str)
def test_flaxs_attention_at_every_level(level, mesh):
    check(Model(), level=level, **mesh)


ORDERS = ["contiguous", "zigzag"]
QUICK = ["convolution", "documents", "blocks of two sequences"]


@pytest.mark.parametrize("order", quick(ORDERS, ["zigzag"]))
@pytest.mark.parametrize("part", quick([*PARTS, "documents"], QUICK))
def test_what_mixes_positions(part, order):
    check(Model((part,)), sequence=4, order=order)


@pytest.mark.parametrize("order", quick(ORDERS, ["contiguous"]))
@pytest.mark.parametrize("parts", quick(["remat", "scan", "scan remat"], ["scan remat"]))
def test_layers_in_scans_and_recomputed(parts, order):
    check(Model(tuple(parts.split())), sequence=4, order=order)


@pytest.mark.parametrize("reduced", quick(REDUCED, ["masked mean", "next tokens"]))
def test_what_a_loss_does_with_positions(reduced):
    check(Model(), reduced, sequence=4, order="zigzag")


CASES = [
    ("global", "masked mean", 3),
    ("global", "mean", 2),
    ("per_micro_batch", "mean", 2),
    ("per_device", "mean", 1),
    ("per_device", "weighted", 2),
]


@pytest.mark.parametrize(
    ("semantics", "reduced", "micro_batches"), quick(CASES, [CASES[0], CASES[-1]])
)
def test_semantics_and_micro_batches(semantics, reduced, micro_batches):
    check(Model(), reduced, semantics, micro_batches, sequence=4)


@pytest.mark.parametrize("order", quick(ORDERS, ["zigzag"]))
def test_dropout_draws_what_one_device_does(order):
    model = Model(rate=0.3)
    params, key = init(model), jax.random.key(7)

    def loss(params, batch, *, rng):
        return losses(model, params, batch, rngs={"dropout": rng}).mean()

    state, plan = sharded(params, sequence=4, order=order)
    gradient = jax.jit(gshard.value_and_grad(loss, plan))
    found = gradient(state.params, batch(), rng=key)
    assert_gradients(lambda params, batch: loss(params, batch, rng=key), params, found)


@pytest.mark.parametrize("reduced", quick(["mean", "masked mean"], ["mean"]))
def test_gradients_that_are_reduced_later(reduced):
    loss, params = loss_of(Model(), reduced), init(Model())
    state, plan = sharded(params, sequence=4)
    _, local = gshard.value_and_grad(loss, plan, sync=False)(state.params, batch())
    assert_gradients(loss, params, gshard.reduce_gradients(local + local, plan))


@pytest.mark.parametrize(
    ("devices", "shared_by", "tokens", "how"),
    quick(
        [
            (5, 5, 45, ()),
            (7, 7, 35, ()),
            (6, 3, 45, ()),
            (5, 5, 45, (("by", "ring"), ("causal", True))),
            (7, 7, 35, (("by", "gather"), ("window", 6))),
            (6, 3, 45, (("by", "ring"), ("causal", True))),
        ],
        [(6, 3, 45, ())],
    ),
)
def test_odd_numbers_of_devices_and_tokens(devices, shared_by, tokens, how):
    model = Model(how=how)
    loss, params = loss_of(model, "masked mean"), init(model)
    examples = {name: x[:, :tokens] for name, x in batch().items()}
    state, plan = sharded(params, devices=devices, sequence=shared_by)
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, examples)
    assert_gradients(loss, params, found, given=examples)


def test_every_device_sees_other_tokens():
    """Else the comparisons above would pass for slices of one device."""
    tokens = batch()["x"]
    for pieces in (np.split(tokens, 4, 1), np.split(tokens, 2, 0)):
        assert len({x.tobytes() for x in pieces}) == len(pieces)


def test_state_is_sharded_over_sequence_devices_too():
    params = init(Model())
    state, plan = sharded(params, sequence=4)
    assert dict(plan.mesh.shape) == {"shard": 2, "sequence": 4}
    kernel = state.params["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    placed = gshard.shard_batch(batch(), plan)
    assert {x.data.shape for x in placed["x"].addressable_shards} == {(12, 12)}
    assert plan.batch_specs(placed)["x"] == jax.P(("shard",), "sequence")
