"""Batches of `DataLoader(pad_last=True)`: exact with their mask, a warning without it."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard

LENGTH = 61
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(LENGTH, 4)).astype(np.float32),
    "y": RNG.normal(size=LENGTH).astype(np.float32),
}


def losses(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]).sum(1) - batch["y"]) ** 2


def masked(params, batch):
    found, mask = losses(params, batch), batch["mask"]
    largest = jnp.where(mask, found, -jnp.inf).max()
    size = jnp.sum(params["w"] ** 2)  # not of the batch
    return {
        "sum": (found * mask).sum(), "count": mask.sum(), "largest": largest, "size": size,
        "each": found,
    }  # fmt: skip


def unmasked(params, batch):
    return {"loss": losses(params, batch).mean(), "count": batch["mask"].sum()}


def sharded(level="zero3", devices=8):
    params = {"w": RNG.normal(size=(4, 16)).astype(np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, level, min_shard_size=16)
    return params, state, plan


def loader(plan, size=15):
    size = size // plan.group.devices * plan.group.devices or plan.group.devices
    return gshard.DataLoader(DATA, size, plan, shuffle=False, pad_last=True)


@pytest.mark.parametrize(("level", "devices"), [("zero3", 8), ("os", 3), ("os_g", 5)])
def test_metrics_with_the_mask_are_those_of_the_examples(level, devices):
    params, state, plan = sharded(level, devices)
    evaluate = gshard.make_eval_step(masked, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [(evaluate(state, batch), np.asarray(batch["mask"])) for batch in loader(plan)]
    wanted = np.asarray(losses(params, DATA))
    each = np.concatenate([np.asarray(out["each"])[mask] for out, mask in found])
    np.testing.assert_allclose(each, wanted, rtol=2e-5, atol=1e-6)
    assert sum(int(out["count"]) for out, _ in found) == LENGTH
    np.testing.assert_allclose(sum(float(x["sum"]) for x, _ in found), wanted.sum(), rtol=2e-5)
    np.testing.assert_allclose(max(float(x["largest"]) for x, _ in found), wanted.max(), rtol=2e-5)


@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_an_evaluation_without_the_mask_is_warned_of(semantics):
    _, state, plan = sharded()
    fn = unmasked if semantics == "global" else lambda p, b: unmasked(p, b)["loss"]
    evaluate = gshard.make_eval_step(fn, plan, loss_semantics=semantics)
    with pytest.warns(gshard.GShardWarning, match=r"without batch\['mask'\]") as caught:
        for batch in loader(plan):
            evaluate(state, batch)
    assert len(caught) == 1
    result = "loss" if semantics == "global" else "its result"
    assert f" computes {result} from the batch" in str(caught[0].message)


def test_a_train_step_without_the_mask_is_warned_of_and_one_with_it_is_not():
    _, state, plan = sharded()
    step = gshard.make_train_step(lambda p, b: losses(p, b).mean(), plan)
    words = "the step of the loss .* computes grad_norm, loss, .* from the batch"
    with pytest.warns(gshard.GShardWarning, match=words) as said:
        for batch in loader(plan):
            state, _ = step(state, batch)
    assert len(said) == 1
    step = gshard.make_train_step(
        lambda p, b: (losses(p, b) * b["mask"]).sum() / b["mask"].sum(), plan
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader(plan):
            state, _ = step(state, batch)


def test_a_model_of_nnx_and_a_mask_of_the_users():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (model, _), plan = gshard.shard_train_state(
        (model, optimizer), gshard.make_mesh(), "zero3", min_shard_size=4
    )
    evaluate = gshard.make_eval_step(lambda m, b: (m(b["x"])[:, 0] - b["y"]).mean(), plan)
    with pytest.warns(gshard.GShardWarning, match="computes its result from the batch"):
        evaluate(model, next(iter(loader(plan))))
    # Also if the mask was left behind.
    evaluate = gshard.make_eval_step(lambda m, b: (m(b[0])[:, 0] - b[1]).mean(), plan)
    with pytest.warns(gshard.GShardWarning, match="computes its result from the batch"):
        batch = next(iter(loader(plan)))
        evaluate(model, (batch["x"], batch["y"]))
    own = {**DATA, "mask": np.ones(LENGTH)}  # of tokens, say, and never padding of a loader's
    evaluate = gshard.make_eval_step(lambda m, b: (m(b["x"])[:, 0] - b["y"]).mean(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(model, next(iter(gshard.DataLoader(own, 8, plan))))
        full = {k: x[:56] for k, x in DATA.items()}  # nothing to fill
        evaluate(model, next(iter(gshard.DataLoader(full, 8, plan, pad_last=True))))


def test_the_mask_may_have_another_name_or_dtype():
    _, state, plan = sharded()
    batch = next(iter(loader(plan)))
    renamed = {"x": batch["x"], "y": batch["y"], "weight": batch["mask"]}
    cast = {**batch, "mask": batch["mask"].astype(jnp.float32)}
    for name, given in (("weight", renamed), ("mask", cast)):
        evaluate = gshard.make_eval_step(lambda p, b, n=name: (losses(p, b) * b[n]).sum(), plan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluate(state, given)


def test_batches_that_pass_through_global_batches_keep_their_padding():
    _, state, plan = sharded()
    evaluate = gshard.make_eval_step(unmasked, plan)
    with pytest.warns(gshard.GShardWarning, match=r"computes loss from .* without batch\['mask'\]"):
        for batch in gshard.global_batches(loader(plan), plan):
            evaluate(state, batch)


@pytest.mark.parametrize("axes", [{"sequence": 2}, {"replica": 2}, {}])
def test_a_matrix_with_as_many_rows_as_examples_has_no_entries_for_them(axes):
    devices = jax.devices() if axes else jax.devices()[:1]
    mesh = gshard.make_mesh(devices=devices, **axes)
    state, plan = gshard.shard_train_state(({"w": np.ones((4, 16))}, optax.sgd(0.1)), mesh, "dp")
    batch = next(iter(gshard.DataLoader(DATA, 8, plan, shuffle=False, pad_last=True)))
    evaluate = gshard.make_eval_step(losses, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(state, batch).shape == (8,)
    evaluate = gshard.make_eval_step(
        lambda p, b: jnp.zeros((8, 8)).at[0, 0].add(losses(p, b).sum()), plan
    )
    with pytest.warns(gshard.GShardWarning, match="computes its result from"):
        evaluate(state, batch)


def test_backward_of_a_wrapped_model_without_the_mask_is_warned_of():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    model, optimizer, scaler = gshard.paddle.group_sharded_parallel(
        model, optimizer, "p_g_os", scaler=gshard.GradScaler(init_loss_scaling=8.0), segment_size=4
    )

    def each(m, b):
        return (m(b["x"])[:, 0] - b["y"]) ** 2

    def unmasked(m, b):
        return each(m, b).mean()

    def masked(m, b):
        return gshard.Weighted((each(m, b) * b["mask"]).sum(), b["mask"].sum())

    batches = list(loader(model.plan))
    for loss in (unmasked, scaler.scale(unmasked)):
        with pytest.warns(gshard.GShardWarning, match="backward: the loss .*unmasked") as said:
            for batch in batches:
                model.backward(loss, batch)
                optimizer.clear_grad()
        (text,) = (str(x.message) for x in said)
        assert "computes its result from the batch" in text and "Return gshard.Weighted" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.backward(masked, batches[-1])
    count = LENGTH - 56
    plain = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    wanted = each(plain, {name: x[-count:] for name, x in DATA.items()}).mean()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_padding_that_backward_counts_in_no_sync_is_warned_of():
    """Its loss has one entry for each device, here as many as examples."""
    model = gshard.paddle.DataParallel(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    devices = jax.device_count()
    source = {name: x[: devices - 1] for name, x in DATA.items()}
    batches = gshard.DataLoader(source, devices, model.plan, shuffle=False, pad_last=True)
    with pytest.warns(gshard.GShardWarning, match="Call backward outside no_sync"), model.no_sync():
        model.backward(lambda m, b: (m(b["x"])[:, 0] - b["y"]).mean(), next(iter(batches)))
    model.clear_gradients()
