"""What a user sees who shards sequences in a slightly wrong way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gshard
from tests.train.sequence.models import batch, sharded

PARAMS = {"w": np.ones((48, 48), np.float32)}


def mean(params, batch):
    return (batch["x"] @ params["w"]).mean()


def fails(match, loss=mean, examples=None, **options):
    state, plan = sharded(PARAMS, sequence=4)
    given = {"x": batch()["x"].astype(np.float32)} if examples is None else examples
    with pytest.raises(gshard.GShardError, match=match):
        gshard.make_train_step(loss, plan, **options)(state, given)


def test_sequences_that_cannot_be_shared():
    x = np.ones((24, 49), np.float32)
    fails(r"batch\['x'\] has shape \[24, 49\].*Use sequences of 48 or 52", examples={"x": x})
    fails(r"If dimension 1 is not a sequence.*sequence_dims=\{'\^x\$': None\}", examples={"x": x})
    message = (
        r"no array of the batch has a dimension 1.*evaluation .*sequence_dims=\{'\^x\$': None\}"
    )
    fails(message, examples={"x": np.ones(24, np.float32)})
    fails("has 3 examples.*the 2 groups of devices that share seq", examples={"x": x[:3, :48]})
    fails("has 1 example, which is", examples={"x": x[:1, :48]})
    state, plan = sharded(PARAMS, sequence=4, order="zigzag")
    message = "zig-zag order.*two slices each.*40 or 48.*or sequence_order='contiguous'"
    with pytest.raises(gshard.GShardError, match=message):
        gshard.make_train_step(mean, plan)(state, {"x": x[:, :44]})


def test_arrays_that_are_shorter_are_replicated():
    x = batch()["x"].astype(np.float32)
    examples = {"x": x, "weights": np.arange(24 * 3, dtype=np.float32).reshape(24, 3)}

    def loss(params, batch):
        return mean(params, batch) * batch["weights"].mean()

    state, plan = sharded(PARAMS, sequence=4)
    _, metrics = gshard.make_train_step(loss, plan)(state, examples)
    np.testing.assert_allclose(metrics["loss"], loss(PARAMS, examples), rtol=1e-5)


def frames_loss(params, batch):
    """Frames are (examples, channels, positions)."""
    x = jnp.moveaxis(batch["frames"], 2, 1)
    return jnp.square(x @ params["w"][:3]).mean() + jnp.cumsum(x, 1).mean() * params["w"].mean()


FRAMES = {
    "frames": np.random.default_rng(0).normal(size=(8, 3, 48)).astype(np.float32),
    "mask": np.ones((8, 48), np.float32),
}


def of_frames(sequence_dims, mesh=None):
    state, options = (PARAMS, optax.sgd(0.1)), {"sequence_dims": sequence_dims}
    mesh = mesh or gshard.make_mesh(sequence=4)
    return gshard.shard_train_state(state, mesh, "p_g_os", min_shard_size=0, **options)


def test_a_large_array_that_no_device_shares_is_named():
    state, plan = of_frames(None)
    step = gshard.make_train_step(frames_loss, plan)
    message = (
        r"batch\['frames'\] of shape \[8, 3, 48\] \(4.6. kB\) is not sharded over the sequence .*"
        r"sequence_dims=\{'\^frames\$': 2\}.*sequence_dims=\{'\^frames\$': None\}"
    )
    with pytest.warns(gshard.GShardWarning, match=message):
        step.lower(state, FRAMES)
    state, plan = of_frames({"frames": None})
    gshard.make_train_step(frames_loss, plan).lower(state, FRAMES)  # without a warning


def test_inputs_that_are_shorter_than_a_mask_are_named():
    examples = {"x": np.ones((24, 47, 48), np.float32), "mask": np.ones((24, 48), np.float32)}
    state, plan = sharded(PARAMS, sequence=4)
    message = (
        r"batch\['x'\] of shape \[24, 47, 48\] .*unlike batch\['mask'\] of shape \[24, 48\], .*"
        r"give both 48 positions.*sequence_dims=\{'\^x\$': None\}"
    )
    step = gshard.make_train_step(lambda p, b: mean(p, b) * b["mask"].mean(), plan)
    with pytest.warns(gshard.GShardWarning, match=message):
        step.lower(state, examples)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_an_evaluation_of_single_tokens(order):
    """Nothing is sharded over the sequence axis, and attention runs on every device."""
    options = {"sequence_dims": {"^token$": None}, "sequence_order": order, "min_shard_size": 0}
    mesh = gshard.make_mesh(sequence=4)
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "p_g_os", **options)
    x = np.random.default_rng(0).normal(size=(8, 1, 48)).astype(np.float32)

    def evaluate(params, batch):
        h = (batch["token"].reshape(8, -1, 48) @ params["w"]).reshape(8, -1, 4, 12)
        return gshard.sequence.attention(h, h, batch["token"].reshape(h.shape), causal=True)

    for token in (x, x[:, 0]):
        found = gshard.make_eval_step(evaluate, plan)(state, {"token": token})
        np.testing.assert_allclose(found, evaluate(PARAMS, {"token": token}), rtol=1e-5)
    with pytest.raises(gshard.GShardError, match="leaves no array of the batch.*another name"):
        gshard.make_train_step(frames_loss, plan)(state, {"token": x})
    tokens = {"tokens": FRAMES["mask"]}  # are sharded with the same plan
    gshard.make_train_step(lambda p, b: b["tokens"].mean() * p["w"].sum(), plan)(state, tokens)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_the_dimension_of_a_sequence_is_named(order):
    mesh = gshard.make_mesh(sequence=4)
    options = {"sequence_dims": {"fra": np.int64(2)}, "sequence_order": order, "min_shard_size": 0}
    state, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "p_g_os", **options)
    frames = gshard.shard_batch(FRAMES, plan)["frames"]
    assert frames.sharding.shard_shape(frames.shape) == (4, 3, 12)
    step = gshard.make_train_step(frames_loss, plan)
    state, metrics = step(state, FRAMES)
    wanted, grads = jax.value_and_grad(frames_loss)(PARAMS, FRAMES)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    updated = gshard.full_params(state)["w"]
    np.testing.assert_allclose(updated, PARAMS["w"] - 0.1 * grads["w"], rtol=1e-5)
    evaluated = gshard.make_eval_step(frames_loss, plan)(state, FRAMES)
    np.testing.assert_allclose(evaluated, frames_loss({"w": updated}, FRAMES), rtol=1e-5)


def test_a_dimension_that_does_not_fit():
    for wrong in (["frames"], 2):
        with pytest.raises(gshard.GShardError, match="sequence_dims=.* must map path patterns"):
            of_frames(wrong)
    for wrong in (0, True, "2"):
        message = r"sequence_dims\['frames'\]=.* must be a whole number, 1 or more"
        with pytest.raises(gshard.GShardError, match=message):
            of_frames({"frames": wrong})
    with pytest.raises(gshard.GShardError, match="sequence_dims pattern .* is not a regular"):
        of_frames({"(": 2})
    with pytest.warns(gshard.GShardWarning, match="sequence_dims=.* changes nothing on a mesh wit"):
        of_frames({"frames": 2}, gshard.make_mesh())
    for dims, message in (
        ({"frames": 3}, r"batch\['frames'\] has shape \[8, 3, 48\], and no dimension 3"),
        (
            {"frames": 1},
            r"sequences of 3 \(dimension 1\) cannot be sharded evenly over.*sequences of 4",
        ),
    ):
        state, plan = of_frames(dims)
        with pytest.raises(gshard.GShardError, match=message):
            gshard.shard_batch(FRAMES, plan)
    state, plan = of_frames({"frames": 2, "frame_": 1, "token": None})  # of an evaluation
    with pytest.warns(gshard.GShardWarning, match="pattern 'frame_' matches no array of the batch"):
        gshard.make_train_step(frames_loss, plan).lower(state, FRAMES)


@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_collectives_of_the_users_own(semantics):
    options = {"loss_semantics": semantics}

    def indexed(params, batch):
        return mean(params, batch) * lax.axis_index("sequence")

    fails("axis_index at .* runs over 'sequence'.*sees full sequences", indexed, **options)

    def summed(params, batch):
        return mean(params, batch) + lax.psum(params["w"].mean(), "sequence")

    fails("psum at .* sums over the devices a value that is already", summed, **options)


def test_what_gathers_too_much():
    def loss(params, batch):
        return (jnp.cumsum(batch["x"], 1) @ params["w"]).mean()

    line = r"cumsum at .*test_bad_input.py:\d+ mixes positions of the sequence"
    fails(rf"{line}.*float32\[24, 48\] \(0.0023 MB per device\)", loss, gather_limit=100)


def test_logits_without_the_last_position_are_told_to_shift_the_targets():
    def loss(params, batch):
        logits, targets = (batch["x"] @ params["w"])[:, :-1], batch["x"][:, 1:].sum(-1)
        return (jax.nn.logsumexp(logits, axis=-1) - targets).mean()

    fails(r"(?s)slice at .*shift_left\(tokens, fill=0\)", loss, gather_limit=100)


def of_all_examples(params, batch):
    """Mixes the examples of each position, which are sharded over the other axes."""
    x = batch["x"] @ params["w"]
    return (jnp.median(x, 0) * jnp.sort(x, 0).mean(0)).mean()


EVALUATED_TWICE = {
    "sequence": {"sequence": 4},
    "experts": {"expert": 2},
    "experts and sequence": {"shape": {"data": 2, "expert": 2}, "sequence": 2},
}


@pytest.mark.parametrize("axes", EVALUATED_TWICE)
def test_what_mixes_examples_names_the_line_of_the_loss(axes):
    """After the loss was evaluated over one axis, its lines are those of that evaluation."""
    has_experts = "experts" in axes
    experts = {"experts": np.ones((4, 48, 48), np.float32)}
    params = {**PARAMS, **experts} if has_experts else PARAMS

    def loss(params, batch):
        found = of_all_examples(params, batch)
        if has_experts:
            found += jnp.einsum("bi,eij->bej", batch["x"], params["experts"]).mean()
        return found

    mesh = gshard.make_mesh(**EVALUATED_TWICE[axes])
    options = {"min_shard_size": 0, "keep": {"experts": ("expert", 0)} if has_experts else None}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os", **options)
    first = of_all_examples.__code__.co_firstlineno
    line = rf"test_bad_input.py:({first + 2}|{first + 3})"
    examples = {"x": np.resize(batch()["x"], (32, 48)).astype(np.float32)}
    for options in ({"gather_limit": 10}, {"micro_batches": 2}):
        with pytest.raises(gshard.GShardError, match=rf"\w+ at .*{line} (mixes|needs all) exam"):
            gshard.make_train_step(loss, plan, **options)(state, examples)
    step = gshard.make_train_step(loss, plan)
    step.lower(state, examples)
    assert step.loss_transfers
    for x in step.loss_transfers:
        assert "test_bad_input.py:" in x.line or x.operation == "result", x


def test_an_order_of_the_operations_themselves():
    def loss(params, batch):
        return mean(params, batch) + gshard.sequence.positions(batch["x"], order="zigzag").mean()

    fails("whose losses see sequences in their own order", loss)


def test_meshes():
    with pytest.raises(gshard.GShardError, match="say sequence=2 instead"):
        gshard.make_mesh(extra={"sequence": 2})
    with pytest.raises(gshard.GShardError, match="leave out sequence=2"):
        gshard.make_mesh({"sequence": 2}, sequence=2)
    with pytest.raises(gshard.GShardError, match="sequence=3 takes 3, which does not divide"):
        gshard.make_mesh(sequence=3)
    given = (PARAMS, optax.sgd(0.1))
    with pytest.raises(gshard.GShardError, match="replica_axes=.* has 'sequence'"):
        mesh = gshard.make_mesh(sequence=2)
        gshard.shard_train_state(given, mesh, "dp", replica_axes="sequence")
    with pytest.raises(gshard.GShardError, match="sequence_order='zig' is unknown"):
        gshard.shard_train_state(given, mesh, "dp", sequence_order="zig")
    with pytest.warns(gshard.GShardWarning, match="sequence_order='zigzag' changes nothing"):
        sharded(PARAMS, order="zigzag")


@pytest.mark.filterwarnings("ignore:no parameter is sharded over mesh axes model")
def test_axes_of_other_names_are_shard_axes_next_to_it():
    mesh = gshard.make_mesh({"data": 2, "sequence": 4})
    _, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), mesh, "os", min_shard_size=0)
    assert plan.group.shard == ("data", "sequence")
    assert plan.data_axes == ("data",)
    named = gshard.make_mesh({"data": 2, "sequence": 2, "model": 2})
    options = {"shard_axes": "data", "min_shard_size": 0}
    _, plan = gshard.shard_train_state((PARAMS, optax.sgd(0.1)), named, "os", **options)
    assert plan.group.shard == ("data", "sequence")
