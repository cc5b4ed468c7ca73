"""Kept experts with the other things that a state can have, against one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax.contrib import muon

import gshard
from gshard.train.optim import offload
from tests.experts import (
    DATA_EXPERT,
    KEEP,
    D,
    E,
    F,
    V,
    batch,
    clipped_adamw,
    every_token,
    mean_loss,
    params,
    sharded,
    worst,
)
from tests.processes import run_workers
from tests.tiers import quick

ONE = {"devices": jax.devices()[:1]}


def trained(mesh: Any, level: str, loss: Any, p: Any = None, steps: int = 2, **options: Any) -> Any:
    """The last loss, and the parameters after some steps; the plan."""
    keep = None if mesh in (ONE, {}) else KEEP
    state, plan = sharded(mesh, level, p, **({"keep": keep} | options))
    step = gshard.make_train_step(loss, plan)
    for seed in range(steps):
        state, metrics = step(state, batch(seed))
    return float(metrics["loss"]), jax.tree.map(np.asarray, gshard.full_params(state)), plan


def wide() -> Any:
    """Arrays that are large enough to be quantized."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "embed": normal(V, 64),
        "router": normal(64, E),
        "experts": {"up": normal(E, 64, 128), "down": normal(E, 128, 64)},
        "head": normal(64, V),
    }


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_bfloat16_with_master_copies(level):
    loss = mean_loss("one-hot")
    found = trained(DATA_EXPERT, level, loss, precision="bfloat16")
    wanted = trained(ONE, level, loss, precision="bfloat16")
    assert abs(found[0] - wanted[0]) < 2e-3
    assert found[2].master["experts/up"].kept == found[2].params["experts"]["up"].kept
    diff = jax.tree.map(lambda x, y: np.abs(x.astype(np.float32) - y).mean(), found[1], wanted[1])
    assert max(jax.tree.leaves(diff)) < 1e-3


@pytest.mark.filterwarnings("ignore:wire='int8'")  # some arrays are small
def test_quantized_communication_rounds_experts_as_other_arrays():
    loss, given, p = mean_loss("every token"), batch(), wide()
    reference = jax.jit(jax.grad(loss))(p, given)
    state, plan = sharded(DATA_EXPERT, "p_g_os", p, wire="int8")
    _, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, given)
    assert plan.params["experts"]["up"].gathered_as is not None

    def off(x: Any, y: Any) -> float:
        return float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y))

    for error in jax.tree.leaves(jax.tree.map(off, grads, reference)):
        assert 0 < error < 0.03


def test_optimizer_state_of_8_bits():
    loss = mean_loss("every token")
    precision = gshard.Precision(compute_dtype="float32", state_dtype="int8")
    options = {"p": wide(), "steps": 3, "precision": precision, "tx": optax.adamw(1e-3)}
    found = trained(DATA_EXPERT, "p_g_os", loss, **options)
    wanted = trained({}, "p_g_os", loss, **options)
    exact = trained({}, "p_g_os", loss, **(options | {"precision": None}))
    assert "in 8 bits" in str(found[2])
    assert worst(found[1], exact[1]) < 3 * max(worst(wanted[1], exact[1]), 1e-3)


def test_state_in_host_memory(monkeypatch):
    """Experts, whose rows belong to several devices, are not cut into chunks."""
    monkeypatch.setattr(offload, "GROUP_SIZE", 512)
    loss = mean_loss("one-hot")
    found = trained(DATA_EXPERT, "p_g_os", loss, offload=True)
    wanted = trained(DATA_EXPERT, "p_g_os", loss)
    assert found[2].params["experts"]["up"].on_host
    assert worst(found[1], wanted[1]) < 1e-5
    state, plan = sharded(DATA_EXPERT, "p_g_os", keep=KEEP, offload=True)
    audit = gshard.audit(gshard.make_train_step(loss, plan), state, batch())
    assert audit.exceeded == () and "compiler" not in {x.purpose for x in audit.collectives}


def test_matrices_of_another_optimizer_than_the_experts():
    labels = {"embed": "muon", "router": "adam", "experts": "adam", "head": "muon"}
    tx = optax.partition({"muon": muon(1e-2), "adam": optax.adam(1e-2)}, labels)
    loss = mean_loss("one-hot")
    found, wanted = (trained(mesh, "p_g_os", loss, tx=tx) for mesh in (DATA_EXPERT, ONE))
    assert worst(found[1], wanted[1]) < 2e-5


def test_matrix_products_of_experts_are_exact_and_named():
    dims = jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), params()
    )
    tx, loss = muon(1e-2, muon_weight_dimension_numbers=dims), mean_loss("one-hot")
    wanted = trained(ONE, "p_g_os", loss, tx=tx)
    with pytest.warns(gshard.GShardWarning, match="multiplies matrices computed from .*experts/up"):
        found = trained(DATA_EXPERT, "p_g_os", loss, tx=tx)
    assert worst(found[1], wanted[1]) < 2e-5


def test_matrix_products_of_experts_that_no_other_axis_shards_stay_on_their_devices():
    p = {"experts": {"up": params()["experts"]["up"]}}
    dims = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), p)
    tx = muon(1e-2, muon_weight_dimension_numbers=dims)
    state, plan = sharded({"shape": {"expert": 8}}, "os", p, tx, min_shard_size=100)

    def loss(p, x):
        return jnp.square(jnp.einsum("bd,edf->ebf", x, p["experts"]["up"])).mean()

    step = gshard.make_train_step(loss, plan)  # and no warning
    audit, x = gshard.audit(step, state, np.ones((8, D), np.float32)), step.budget.products
    assert not any(row.purpose in ("optimizer", "compiler") for row in audit.collectives)
    of_loss = 3 * 2 * 8 * D * F * E // 8  # at most: of the product and two derivatives
    assert x.flops == x.one_device // 8 and 0 <= audit.flops - x.flops <= of_loss


@pytest.mark.parametrize("tx", [optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.lamb(1e-2)])
def test_optimizers_across_the_entries_of_an_array(tx):
    loss = mean_loss("one-hot")
    found, wanted = (trained(mesh, "os_g", loss, tx=tx) for mesh in (DATA_EXPERT, ONE))
    assert worst(found[1], wanted[1]) < 2e-5


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"reshard_after_forward": False}, {"data": 4, "expert": 2}),
        ({"reshard_after_forward": 2}, {"data": 4, "expert": 2}),
        ({"reshard_after_forward": 2}, {"expert": 8}),  # the experts have nothing to gather
    ],
    ids=str,
)
def test_gathered_parameters_that_are_kept_for_the_backward_pass(options, sizes):
    mesh, loss = {"shape": sizes}, mean_loss("one-hot")
    state, plan = sharded(mesh, "p_g_os")
    found = jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, batch())
    assert worst(found[1], jax.grad(loss)(params(), batch())) < 2e-6


@pytest.mark.filterwarnings("ignore:the result of the loss all-gathers a parameter that is kept")
def test_a_micro_batch_begins_with_the_kept_state_that_the_one_before_it_changed():
    class State(TrainState):
        ema: Any

    def loss(p, x, *, ema):
        y = jnp.einsum("bd,edf->ebf", x, (p["experts"]["up"] + ema["experts"]["up"]) / 2)
        seen = jax.lax.stop_gradient(p["experts"]["up"]) * x.mean()
        ema = {"experts": {"up": 0.9 * ema["experts"]["up"] + 0.1 * seen}}
        return jnp.square(y).mean(), {"ema": ema}

    p = {"experts": {"up": params()["experts"]["up"]}}
    x = np.random.default_rng(0).normal(size=(32, D)).astype(np.float32)
    found = {}
    for mesh, keep in (({}, None), (DATA_EXPERT, KEEP)):
        state = State.create(apply_fn=None, params=p, tx=optax.sgd(0.1), ema=p)
        state, plan = gshard.shard_train_state(
            state, gshard.make_mesh(**mesh), "p_g_os", keep=keep, min_shard_size=0
        )
        step = gshard.make_train_step(
            loss, plan, mutable="ema", micro_batches=2, loss_semantics="per_micro_batch"
        )
        new = plan.unwrap(step(state, x)[0])
        found[keep is None] = {"params": new.params, "ema": new.ema}
    assert worst(found[False], found[True]) < 2e-6


def test_sequences_and_experts_on_one_mesh():
    mesh, loss = {"shape": {"data": 2}, "expert": 2, "sequence": 2}, mean_loss("every token", True)
    state, plan = sharded(mesh, "p_g_os")
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    wanted = jax.value_and_grad(loss)(params(), batch())
    assert abs(float(found[0]) - float(wanted[0])) < 2e-6 and worst(found[1], wanted[1]) < 2e-6


MASKED = {
    "sequence 2, expert 2": {"sequence": 2, "expert": 2},
    "sequence 2, expert 4": {"sequence": 2, "expert": 4},
    "sequence 3, expert 2": {"devices": jax.devices()[:6], "sequence": 3, "expert": 2},
    "replica 2, sequence 2, expert 2": {"replica": 2, "sequence": 2, "expert": 2},
}


@pytest.mark.parametrize("mesh", quick(list(MASKED), ["sequence 2, expert 2"]))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_mask_of_examples_counts_once_where_sequences_are_sharded_too(micro_batches, mesh):
    keep = (np.arange(len(batch()["x"])) % 3 > 0).astype(np.float32)
    examples, mean = {**batch(), "keep": keep}, mean_loss("every token", True)

    def loss(p, b):
        own = {name: x for name, x in b.items() if name != "keep"}
        each = jax.vmap(lambda b: mean(p, jax.tree.map(lambda x: x[None], b)))(own)
        return (each * b["keep"]).sum() / b["keep"].sum()

    state, plan = sharded(MASKED[mesh], "p_g_os")
    grad = gshard.value_and_grad(loss, plan, micro_batches=micro_batches)
    found, wanted = (
        jax.jit(grad)(state.params, examples),
        jax.jit(jax.value_and_grad(loss))(params(), examples),
    )
    assert abs(float(found[0]) - float(wanted[0])) < 2e-6 and worst(found[1], wanted[1]) < 2e-6


def test_a_checkpoint_moves_to_any_number_of_expert_devices(tmp_path):
    loss, tx = mean_loss("one-hot"), clipped_adamw()
    state, plan = sharded(DATA_EXPERT, "p_g_os", tx=tx)
    step = gshard.make_train_step(loss, plan, donate=False)
    state, _ = step(state, batch(0))
    with gshard.Checkpointer(tmp_path) as saved:
        saved.save(1, state)
    wanted = jax.tree.map(np.asarray, gshard.full_params(step(state, batch(1))[0]))
    for mesh, level, keep in (
        ({"expert": 2}, "p_g_os", KEEP),
        ({"expert": 8}, "os", KEEP),
        ({}, "os_g", None),
        ({"devices": jax.devices()[:3]}, "p_g_os", None),
    ):
        other, other_plan = sharded(mesh, level, tx=tx, keep=keep)
        with gshard.Checkpointer(tmp_path) as saved:
            other = saved.restore(like=other).state
        other = gshard.make_train_step(loss, other_plan)(other, batch(1))[0]
        assert worst(gshard.full_params(other), wanted) < 1e-5


class Mixture(nnx.Module):
    """The same model in NNX; a name in the metadata keeps the experts."""

    def __init__(self, rngs: nnx.Rngs):
        kept = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("expert", None, None))
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.router = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (D, E)))
        self.up = nnx.Param(kept(rngs.params(), (E, D, F)))
        self.down = nnx.Param(kept(rngs.params(), (E, F, D)))
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(self.embed(x))
        p = {"router": self.router[...], "experts": {"up": self.up[...], "down": self.down[...]}}
        return self.head(h + every_token(p, h))


def test_nnx_experts_are_kept_by_their_metadata():
    def made():
        with nnx.use_eager_sharding(False):  # Flax would want a mesh here
            model = Mixture(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model, given):
        out = model(given["x"])
        return optax.softmax_cross_entropy_with_integer_labels(out, given["y"]).mean()

    found = []
    for mesh in (ONE, DATA_EXPERT):
        (model, optimizer), plan = gshard.shard_train_state(
            made(), gshard.make_mesh(**mesh), "p_g_os", min_shard_size=0
        )
        step = gshard.make_train_step(loss, plan)
        for seed in range(2):
            metrics = step(model, optimizer, batch(seed))
        found.append((float(metrics["loss"]), str(plan)))
    assert abs(found[0][0] - found[1][0]) < 5e-6
    assert found[1][1].count("kept on expert") == 4


@pytest.mark.slow
def test_two_processes_share_experts_and_examples(tmp_path):
    for found in run_workers(tmp_path, "train.experts_worker"):
        np.testing.assert_allclose(found["losses"], found["of_one_device"], rtol=2e-6)
        assert np.diff(found["mine"]).max() > 1  # each has examples of every expert device
        np.testing.assert_allclose(
            found["by_position"], found["by_position_of_one_device"], rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(("level", "order"), [("os", "contiguous"), ("p_g_os", "zigzag")])
def test_sequences_experts_shards_and_replicas(tmp_path, level, order):
    """On 16 devices, two for each axis: this process has too few."""
    module, sizes = "train.four_axes_worker", {"processes": 1, "devices_each": 16}
    (found,) = run_workers(tmp_path, module, level, order, **sizes)
    assert found["sizes"].tolist() == [2, 2, 2, 2]
    for name in ("losses", "gradients", "parameters"):
        assert np.abs(found[name]).max() < 2e-6, name
    assert not found["exceeded"].size and "loss" in found["sent_for"]
    assert found["restored"] == found["moments"] == 0
