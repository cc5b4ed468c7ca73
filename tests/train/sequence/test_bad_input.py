"""What a user sees who shards sequences in a slightly wrong way."""

from __future__ import annotations

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
    fails(r"one-hot labels: pass it as dimension 2, labels\[:, None\]", examples={"x": x})
    fails("no array of the batch has a dimension 1", examples={"x": np.ones(24, np.float32)})
    fails("has 3 examples.*multiple of the 2 devices", examples={"x": x[:3, :48]})
    state, plan = sharded(PARAMS, sequence=4, order="zigzag")
    with pytest.raises(gshard.GShardError, match="zig-zag order.*two slices each.*40 or 48"):
        gshard.make_train_step(mean, plan)(state, {"x": x[:, :44]})


def test_arrays_that_are_shorter_are_replicated():
    x = batch()["x"].astype(np.float32)
    examples = {"x": x, "weights": np.arange(24 * 3, dtype=np.float32).reshape(24, 3)}

    def loss(params, batch):
        return mean(params, batch) * batch["weights"].mean()

    state, plan = sharded(PARAMS, sequence=4)
    _, metrics = gshard.make_train_step(loss, plan)(state, examples)
    np.testing.assert_allclose(metrics["loss"], loss(PARAMS, examples), rtol=1e-5)


@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_collectives_of_the_users_own(semantics):
    options = {"loss_semantics": semantics}

    def indexed(params, batch):
        return mean(params, batch) * lax.axis_index("sequence")

    fails("axis_index at .* runs over 'sequence'.*sees full sequences", indexed, **options)

    def summed(params, batch):
        return mean(params, batch) + lax.psum(params["w"].mean(), "sequence")

    fails("psum at .* sums over the devices what is already", summed, **options)


def test_what_gathers_too_much():
    def loss(params, batch):
        return (jnp.cumsum(batch["x"], 1) @ params["w"]).mean()

    line = r"cumsum at .*test_bad_input.py:\d+ mixes positions of the sequence"
    fails(rf"{line}.*float32\[24, 48\] \(0.0023 MB per device\)", loss, gather_limit=100)


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
    with pytest.raises(gshard.GShardError, match="sequence=3 take 3, which does not divide"):
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
