"""Evaluation, data, checkpoints, NNX and processes with sharded sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.analysis.monitor.mfu import model_flops
from tests import experts
from tests.processes import run_workers
from tests.train.sequence.models import (
    Model,
    V,
    batch,
    init,
    loss_of,
    losses,
    on_one_device,
    sharded,
)


def outputs(params, batch):
    found = losses(Model(), params, batch)
    return {
        "loss": found.mean(),
        "masked": gshard.Weighted((found * batch["mask"]).sum(), batch["mask"].sum()),
        "tokens": gshard.Reduced(batch["mask"].sum(), "sum"),
        "largest": gshard.Reduced(found.max(), "max"),
        "of_examples": found.mean(1),
        "of_positions": found,
    }


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_evaluation(semantics, order):
    params = init(Model())
    state, plan = sharded(params, sequence=4, order=order)
    evaluate = gshard.make_eval_step(outputs, plan, loss_semantics=semantics)
    found, wanted = evaluate(state, batch()), outputs(params, batch())
    for name, x in found.items():
        y = wanted[name]
        y = y.sum / y.weight if isinstance(y, gshard.Weighted) else getattr(y, "value", y)
        np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize("count", ["sum of the mask", "number that it has"])
def test_a_mask_of_examples(count, level):
    """Its sum is the same on all devices of the sequence axis, and counts once."""
    params, keep = init(Model()), (np.arange(len(batch()["mask"])) % 3 > 0).astype(np.float32)
    examples = {**batch(), "keep": keep}

    def loss(params, batch):
        found = losses(Model(), params, batch).mean(1)
        own = batch["keep"]
        return (found * own).sum() / (own.sum() if count == "sum of the mask" else (own > 0).sum())

    state, plan = sharded(params, level=level, sequence=2)
    value, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, examples)
    wanted, of_one = jax.jit(jax.value_and_grad(loss))(params, examples)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(of_one), strict=True):
        x = x[tuple(slice(n) for n in y.shape)]
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("semantics", ["global", "per_micro_batch", "per_device"])
def test_auxiliary_outputs(semantics):
    params = init(Model())

    def loss(params, batch):
        found = outputs(params, batch)
        del found["of_examples"], found["of_positions"]
        return found.pop("loss"), found

    state, plan = sharded(params, sequence=4)
    options = {"has_aux": True, "loss_semantics": semantics, "micro_batches": 2}
    aux = gshard.make_train_step(loss, plan, **options)(state, batch())[1]["aux"]
    wanted = loss(params, batch())[1]
    np.testing.assert_allclose(aux["largest"], wanted["largest"].value, rtol=1e-5)
    if semantics == "per_micro_batch":
        return  # sums and quotients of micro-batches are averaged
    np.testing.assert_allclose(aux["tokens"], wanted["tokens"].value)
    masked = wanted["masked"]
    np.testing.assert_allclose(aux["masked"], masked.sum / masked.weight, rtol=1e-5)


EXTREMES = {
    "largest": lambda x: x.max(),
    "smallest": lambda x: (x - 3).min(),
    "of integers": lambda x: jnp.floor(8 * x).astype(jnp.int32).max(),
    "any": lambda x: jnp.any(x > 4.5),
    "all": lambda x: jnp.all(x > 1e-6),
    "not a number": lambda x: jnp.where(x > 4.5, jnp.nan, x).max(),
    "of sequences, in a mean": lambda x: x.max(1).mean(),
    "of one example": lambda x: (x.max(1) - x.min(1)).max(),
}


@pytest.mark.parametrize("mesh", [{"sequence": 4}, {"sequence": 2, "replica": 2}])
def test_extremes_of_all_micro_batches(mesh):
    params = init(Model())

    def loss(params, batch):
        found = losses(Model(), params, batch)
        extremes = {name: extreme(found) for name, extreme in EXTREMES.items()}
        return found.mean() + found.max(1).mean(), extremes

    state, plan = sharded(params, "os", **mesh)
    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=3)
    _, metrics = step(state, batch())
    value, wanted = jax.jit(loss)(params, batch())
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert wanted["any"] and np.isnan(wanted["not a number"])
    for name, x in wanted.items():
        np.testing.assert_allclose(metrics["aux"][name], x, rtol=1e-5, err_msg=name)


def test_extremes_of_micro_batches_where_experts_are_kept():
    """They are taken over the sequence, then over the axis of the experts, then over the rest."""
    given = experts.batch(tokens=8)

    def loss(p, batch):
        h = jnp.tanh(p["embed"][batch["x"]])
        out = (h + experts.one_hot(p, h)) @ p["head"]
        found = {name: extreme(out) for name, extreme in EXTREMES.items()}
        return jnp.square(out).mean(), found

    options = {"sequence": 2, "expert": 2}
    state, plan = experts.sharded(options, "os")
    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=3)
    _, metrics = step(state, given)
    value, wanted = jax.jit(loss)(experts.params(), given)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, x in wanted.items():
        np.testing.assert_allclose(metrics["aux"][name], x, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_slices_without_a_position(order):
    def loss(params, batch):
        x = jnp.tanh(params["w"] * batch["x"])
        return jnp.square(jnp.concatenate([x[:, :0], x, x[:, 3:3]], 1)).mean()

    given = {"x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)}
    start = {"w": np.full(16, 0.5, np.float32)}
    mesh = gshard.make_mesh(sequence=4)
    state, plan = gshard.shard_train_state(
        (start, optax.sgd(0.1)), mesh, "os", sequence_order=order, min_shard_size=0
    )
    value, grads = gshard.value_and_grad(loss, plan)(state.params, given)
    wanted, exact = jax.value_and_grad(loss)(start, given)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], exact["w"], rtol=1e-5)


def test_a_loader_and_steps_with_adam():
    """Three steps with clipping, of batches that a loader shuffles."""
    params = init(Model())
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    loss, data = loss_of(Model(), "masked mean"), {k: v for k, v in batch().items()}

    def trained(mesh):
        given = (params, tx)
        state, plan = gshard.shard_train_state(given, mesh, "p_g_os", min_shard_size=0)
        step = gshard.make_train_step(loss, plan)
        loader = gshard.DataLoader(data, 8, plan, seed=3)
        for examples in loader:
            if mesh.size > 1:
                assert examples["x"].sharding.spec == jax.P(("shard",), "sequence")
            state, metrics = step(state, examples)
        return gshard.full_params(state), metrics["loss"]

    found = trained(gshard.make_mesh(sequence=4))
    wanted = trained(gshard.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (found[0], wanted[0])), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-5)


def test_a_checkpoint_goes_to_another_number_of_sequence_devices(tmp_path):
    params, loss = init(Model()), loss_of(Model())
    state, plan = sharded(params, sequence=4)
    state, _ = gshard.make_train_step(loss, plan)(state, batch())
    with gshard.Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(1, state)
    for mesh in ({"sequence": 2}, {"replica": 2}):
        other, plan = sharded(params, "os", **mesh)
        with gshard.Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(like=other).state
        both = (jax.tree.leaves(gshard.full_params(x)) for x in (state, restored))
        for x, y in zip(*both, strict=True):
            np.testing.assert_array_equal(x, y)
        _, metrics = gshard.make_train_step(loss, plan)(restored, batch())
        np.testing.assert_allclose(
            metrics["loss"], on_one_device(loss, gshard.full_params(state), batch())[0], rtol=1e-5
        )


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("by", ["ring", "ulysses"])
def test_model_flops_are_those_of_one_device(by, order):
    """Of contiguous slices the last device attends to all others, and the first to itself alone."""

    def loss(params, batch):
        heads = (batch @ params["w"]).reshape(2, 2048, 4, 8)
        out = gshard.sequence.attention(heads, heads, heads, causal=True, by=by, block_size=256)
        return out.mean()

    params = {"w": np.ones((16, 32), np.float32)}
    examples = np.ones((2, 2048, 16), np.float32)
    found = []
    for mesh in ({"sequence": 4}, {"devices": 1}):
        state, plan = sharded(params, order=order if "sequence" in mesh else "contiguous", **mesh)
        step = gshard.make_train_step(loss, plan)
        flops = model_flops(step, gshard.shard_batch(examples, plan))
        found.append(plan.mesh.size * sum(flops.values()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_audit_says_what_is_sent_for_the_loss():
    model = Model(how=(("by", "ring"), ("causal", True)))
    params = init(model)
    state, plan = sharded(params, "os", sequence=4)
    report = gshard.audit(gshard.make_train_step(loss_of(model), plan), state, batch())
    assert {x.purpose for x in report.collectives if x.kind == "collective-permute"} == {"loss"}


class Attending(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(V, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.out = nnx.Linear(16, V, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.out(x)


def test_an_nnx_model():
    def loss(model, batch):
        out = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"]).mean()

    def made():
        model = Attending(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    found = []
    for mesh in (gshard.make_mesh(sequence=4), gshard.make_mesh(devices=jax.devices()[:1])):
        pair, plan = gshard.shard_train_state(made(), mesh, "p_g_os", min_shard_size=0)
        step = gshard.make_train_step(loss, plan)
        for _ in range(2):
            metrics = step(*pair, batch())
        found.append(metrics["loss"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_processes_that_share_sequences(tmp_path):
    """Two processes have half of the devices along each sequence, and give the same examples."""
    for found in run_workers(tmp_path, "train.sequence.worker"):
        np.testing.assert_allclose(found["losses"], found["of_one_device"], rtol=1e-5)
        assert "must give the same examples" in str(found["of_other_examples"])
        assert found["slice"].shape == (24, 12)
