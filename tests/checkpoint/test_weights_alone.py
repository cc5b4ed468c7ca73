"""`restore(only=...)`: weights of a checkpoint in a state that keeps everything else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


COLLECTIONS = ("params", "batch_stats")


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(self.width)(x))
        return nn.Dense(3, name="head")(x)


IN_8_BITS = gshard.Precision(state_dtype="int8", state_exceptions={"kernel": "int8"})


class State(TrainState):
    batch_stats: Any
    average: Any
    key: jax.Array


def state(seed: int, tx: optax.GradientTransformation, width: int = 10) -> State:
    """A state of which every array depends on the seed."""
    net = Net(width)
    variables = net.init(jax.random.key(seed), jnp.ones((1, 5)))
    params, stats = (jax.tree.map(lambda x: x + seed, variables[name]) for name in COLLECTIONS)
    average = jax.tree.map(lambda x: x + 0.5, params)
    more = {"batch_stats": stats, "average": average, "key": jax.random.key(seed)}
    return State.create(apply_fn=net.apply, params=params, tx=tx, **more)


def shard(plain, level="os", devices=3, **how):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(plain, mesh, level, min_shard_size=0, **how)


def loss(params, batch):
    hidden = batch["x"] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    return jnp.mean((hidden @ params["head"]["kernel"] - batch["y"]) ** 2)


def batch():
    draw = np.random.default_rng(0)
    return {k: draw.normal(size=(15, n)).astype(np.float32) for k, n in (("x", 5), ("y", 3))}


def assert_equal(found, expected):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of step 7, of a state that was made with seed 1."""
    directory = tmp_path_factory.mktemp("written") / "run"
    sharded, _ = shard(state(1, optax.sgd(0.1, momentum=0.9)), "p_g_os", 4)
    with gshard.Checkpointer(directory) as checkpointer:
        checkpointer.save(7, sharded, metadata={"loss": 0.5})
    return directory


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"level": "p_g_os", "devices": 5, "frozen": "Dense_0"},
        {"precision": gshard.Precision(compute_dtype="bfloat16")},
        {"level": "p_g_os", "precision": IN_8_BITS},
    ],
    ids=["another optimizer", "frozen", "master copies", "moments in 8 bits"],
)
def test_all_weights_and_nothing_else(written, how):
    """The next steps are those of a new state that has these weights."""
    tx = optax.adamw(0.1)
    own, plan = shard(state(2, tx), **how)
    found = gshard.Checkpointer(written).restore(like=own, only=".")
    assert (found.step, found.metadata) == (7, {"loss": 0.5})
    new, theirs = found.state, state(1, tx)
    assert_equal(gshard.full_params(new), theirs.params)
    plain = plan.unwrap(new)
    assert_equal((plain.batch_stats, plain.average), (theirs.batch_stats, theirs.average))
    assert int(new.step) == 0 and jax.random.key_data(new.key).tolist() == [0, 2]

    expected, _ = shard(theirs, **how)
    step = gshard.make_train_step(loss, plan, donate=False)
    for _ in range(2):
        new, expected = (step(x, batch())[0] for x in (new, expected))
    assert_equal(gshard.full_params(new), gshard.full_params(expected))
    assert_equal(new.opt_state, expected.opt_state)


def test_patterns_choose_weights_and_the_others_stay(written):
    own, _ = shard(state(2, optax.adam(1e-3)))
    checkpointer = gshard.Checkpointer(written)
    new = checkpointer.restore(7, like=own, only=["^head", "^average/head"]).state
    found, theirs = gshard.full_params(new), state(1, optax.adam(1e-3))
    assert_equal(
        (found["head"], new.average["head"]), (theirs.params["head"], theirs.average["head"])
    )
    assert_equal(found["Dense_0"], gshard.full_params(own)["Dense_0"])
    assert new.average["Dense_0"]["kernel"] is own.average["Dense_0"]["kernel"]
    assert new.opt_state.inner[0].mu["head"]["bias"] is own.opt_state.inner[0].mu["head"]["bias"]


def test_averages_that_are_left_out_are_named(written):
    own, _ = shard(state(2, optax.adam(1e-3)))
    with pytest.warns(gshard.GShardWarning, match="average/head/bias, average/head/kernel, with"):
        new = gshard.Checkpointer(written).restore(like=own, only="^head").state
    assert new.average["head"]["bias"] is own.average["head"]["bias"]


def test_copies_that_the_optimizer_makes_are_made_of_them(written):
    tx = optax.contrib.schedule_free_sgd(0.1)
    own, plan = shard(state(2, tx))
    new = gshard.Checkpointer(written).restore(like=own, only=".").state
    assert_equal(plan.unwrap(new).opt_state.z, state(1, tx).params)

    step = gshard.make_train_step(loss, plan, donate=False)
    trained, _ = step(own, batch())
    with pytest.warns(gshard.GShardWarning, match="still belongs to the parameters before"):
        gshard.Checkpointer(written).restore(like=trained, only=".")


def test_an_nnx_pair_is_changed_in_place(tmp_path):
    def pair(seed, tx):
        rngs = nnx.Rngs(seed)
        model = nnx.Sequential(
            nnx.Linear(5, 7, rngs=rngs), nnx.BatchNorm(7, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        )
        model.layers[1].mean[...] += seed
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    theirs = pair(1, optax.adam(0.1))
    sharded, _ = shard(theirs, "p_g_os", 4)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, sharded)
    own, plan = shard(pair(2, optax.sgd(0.1)), "p_g_os", 5)
    key = np.asarray(jax.random.key_data(own[0].layers[2].rngs.key[...]))
    found = gshard.Checkpointer(tmp_path / "run").restore(like=own, only=".").state
    assert found[0] is own[0] and found[1] is own[1]
    plain = plan.unwrap(found)[0]
    for x, y in zip(plain.layers[:2], pair(1, optax.adam(0.1))[0].layers[:2], strict=True):
        assert_equal(nnx.state(x), nnx.state(y))
    assert (np.asarray(jax.random.key_data(own[0].layers[2].rngs.key[...])) == key).all()


def test_a_run_whose_weights_are_read_goes_on_where_it_was(written, tmp_path):
    own, _ = shard(state(2, optax.adam(1e-3)))
    how = {"every": 10, "local": tmp_path / "local", "local_every": 1}
    with gshard.Checkpointer(tmp_path / "run", **how) as checkpointer:
        for number in (10, 11, 12):
            checkpointer.save(number, own)
        checkpointer.wait()
        checkpointer.restore(10, like=own, only=".")
        assert checkpointer.latest_step() == 12
        checkpointer.save(12, own, force=True)
    with gshard.Checkpointer(written) as checkpointer:
        new = checkpointer.restore(like=own, only=".").state
        with pytest.raises(gshard.GShardError, match="step 7 is not after the newest one"):
            checkpointer.save(7, new)


def test_bad_input(written):
    checkpointer, adam = gshard.Checkpointer(written), optax.adam(1e-3)
    own, plan = shard(state(2, adam))
    for only, message in [
        ("nope", "only='nope' fits no weight. There are BatchNorm_0/bias"),
        ([], "chooses nothing"),
        ("(", "not a regular expression"),
        (3, "only=3 must be a name"),
    ]:
        with pytest.raises(gshard.GShardError, match=message.replace("(", r"\(")):
            checkpointer.restore(like=own, only=only)
    for like in (plan, (plan.abstract_state(), plan)):
        with pytest.raises(gshard.GShardError, match="it is abstract. Pass a state with values"):
            checkpointer.restore(like=like, only=".")
    wider, _ = shard(state(2, adam, 11))
    with pytest.raises(gshard.GShardError, match=r"(?s)\(11,\), in the checkpoint \(10,\).*only="):
        checkpointer.restore(like=wider, only="Dense_0")
    less, _ = shard(TrainState.create(apply_fn=None, params=state(2, adam).params, tx=adam))
    with pytest.raises(gshard.GShardError, match="average/head/bias is in the checkpoint alone"):
        checkpointer.restore(like=less, only=".")
    new = checkpointer.restore(
        like=less, only="^(head|Dense_0|BatchNorm_0)/(bias|scale|kernel)"
    ).state
    assert_equal(gshard.full_params(new), state(1, adam).params)


@pytest.mark.filterwarnings("error")
def test_a_pattern_that_ends_in_a_number_and_matches_a_longer_one_is_named():
    params = {f"Dense_{i}": {"w": np.ones((4, 4), "f4")} for i in (0, 1, 10, 11)}
    warned = "the pattern 'Dense_1' also matches Dense_10/w, Dense_11/w, .* Write 'Dense_1/' for"
    for how in ({"frozen": "Dense_1"}, {"rules": {"Dense_1": 0}}):
        with pytest.warns(gshard.GShardWarning, match=warned):
            shard((params, optax.sgd(0.1)), **how)
    for text in ("Dense_1/", "Dense_1[0-9]*", "Dense_0", "Dense_[0-9]"):
        shard((params, optax.sgd(0.1)), rules={text: 0})


def test_the_best_step(written, tmp_path):
    own, _ = shard(state(2, optax.adam(1e-3)))
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.best_step() is None
        for number, found in enumerate([3.0, 1.0, float("nan"), 1.0, 2.0]):
            checkpointer.save(number, own, metadata={"loss": found, "accuracy": -found})
        checkpointer.save(5, own)
    assert gshard.Checkpointer(tmp_path / "run").best_step() == 3
    highest = gshard.Checkpointer(tmp_path / "run", metric="accuracy", mode="max")
    assert highest.best_step() == 3
    with pytest.raises(
        gshard.GShardError, match=r"best_step compares metric='accuracy'.*mode='max'"
    ):
        gshard.Checkpointer(tmp_path / "run", metric="accuracy").best_step()
