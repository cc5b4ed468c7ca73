"""A `TrainState` that plain Orbax saved, read at any level; what is not one is refused in words."""

from __future__ import annotations

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import gshard
from tests.checkpoint.test_checkpoints import (
    ROWS,
    Fields,
    assert_equal_bits,
    fields,
    shard,
    tx,
    values,
)
from tests.zoo import ZOO

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


@pytest.fixture(scope="module")
def trained():
    """A plain state after two steps on one device."""
    model = ZOO["linen_mlp"]
    state = model.state(tx())
    gradient = jax.jit(jax.grad(model.loss))
    for i in range(2):
        state = state.apply_gradients(grads=gradient(state.params, model.batch(0, ROWS, i)))
    return state


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """The folder of a tree, by how it was written."""
    folder = tmp_path_factory.mktemp("orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", trained)
    ocp.PyTreeCheckpointer().save(folder / "tree", trained)
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(7, args=ocp.args.StandardSave(trained))
        manager.wait_until_finished()
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(8, args=ocp.args.Composite(state=ocp.args.PyTreeSave(trained)))
        manager.wait_until_finished()
    return {
        "standard": folder / "standard",
        "tree": folder / "tree",
        "step": folder / "manager" / "7",
        "named": folder / "manager" / "8",
        "item": folder / "manager" / "8" / "state",
    }


@pytest.mark.parametrize("how", ["standard", "tree", "step", "named", "item"])
def test_every_way_to_write_one(trained, written, how):
    like, plan = shard(ZOO["linen_mlp"].state(tx(), seed=1), "p_g_os", 3)
    new = gshard.import_orbax(written[how], like)
    assert_equal_bits(values(plan.unwrap(new)), values(trained) | steps(trained))


def steps(state):
    """The step, which was a Python number, as an array."""
    return {".step": np.asarray(state.step, np.int32)}


@pytest.mark.parametrize(("level", "devices"), [("dp", 1), ("os", 5), ("os_g", 8)])
def test_at_every_level_training_goes_on(trained, written, level, devices):
    model = ZOO["linen_mlp"]
    like, plan = shard(jax.eval_shape(lambda: model.state(tx())), level, devices)
    state = gshard.import_orbax(written["standard"], (like, plan))
    _, metrics = gshard.make_train_step(model.loss, plan)(state, model.batch(0, ROWS, 2))
    expected = model.loss(trained.params, model.batch(0, ROWS, 2))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_master_copies_and_further_fields(tmp_path):
    state = fields().replace(rng=jax.numpy.arange(4, dtype=jax.numpy.uint32))
    ocp.PyTreeCheckpointer().save(tmp_path / "x", state)
    fresh = jax.tree.map(jax.numpy.zeros_like, state)
    like, plan = shard(fresh, "os_g", 4, precision="bfloat16")
    new = gshard.import_orbax(tmp_path / "x", like)
    assert type(new) is Fields
    assert jax.tree.leaves(new.params)[0].dtype == jax.numpy.bfloat16
    expected = values(state) | steps(state)
    found = values(plan.unwrap(new))
    assert_equal_bits(found, expected)


@pytest.mark.parametrize("boxed", [True, False])
def test_boxes_of_flax(tmp_path, boxed):
    model = nn.Dense(6, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None)))

    def made(seed):
        params = model.init(jax.random.key(seed), jax.numpy.ones((1, 4)))["params"]
        params = jax.tree.map(lambda x: x + seed, params)
        return TrainState.create(apply_fn=None, params=params, tx=tx())

    ocp.PyTreeCheckpointer().save(tmp_path / "x", made(3))
    like, plan = shard(made(0) if boxed else nn.unbox(made(0)), "p_g_os", 4)
    new = plan.unwrap(gshard.import_orbax(tmp_path / "x", like))
    for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(made(3).params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_not_one(trained, written, tmp_path):
    like, _ = shard(ZOO["linen_mlp"].state(tx()), "os", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    with gshard.Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(3, like)
    for path, words in [
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "nothing"),
        (written["step"].parent, "7, 8"),
        (tmp_path / "own" / "3", "Checkpointer"),
        (3, "must be the path"),
        ("gs://bucket/old", "gs://bucket/old is an address.*Copy it into one"),
    ]:
        with pytest.raises(gshard.GShardError, match=words):
            gshard.import_orbax(path, like)
    other, _ = shard(fields(), "os", 2)
    with pytest.raises(gshard.GShardError, match="is not in the checkpoint"):
        gshard.import_orbax(written["tree"], other)
    sgd, _ = shard(ZOO["linen_mlp"].state(optax.sgd(0.1)), "os", 2)
    with pytest.raises(gshard.GShardError, match="opt_state/.* is only in the checkpoint"):
        gshard.import_orbax(written["tree"], sgd)
    for bad in (None, trained):
        with pytest.raises(gshard.GShardError, match="import_orbax"):
            gshard.import_orbax(written["tree"], bad)
    with pytest.raises(
        gshard.GShardError, match="holds no checkpoint. Orbax itself wrote .*import_orbax"
    ):
        gshard.Checkpointer(written["step"].parent).restore(like=like)


def test_half_of_one(written, tmp_path):
    import shutil

    like, _ = shard(ZOO["linen_mlp"].state(tx()), "os", 2)
    shutil.copytree(written["tree"], tmp_path / "cut")
    for path in (tmp_path / "cut").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(gshard.GShardError, match="cannot be read: OUT_OF_RANGE"):
        gshard.import_orbax(tmp_path / "cut", like)
    (tmp_path / "cut" / "_METADATA").write_text("{")
    with pytest.raises(gshard.GShardError, match="cannot be read"):
        gshard.import_orbax(tmp_path / "cut", like)


def test_integers_that_do_not_fit_are_refused(tmp_path):
    own = fields().replace(rng=np.arange(5, dtype=np.int32))
    like, plan = shard(own, "p_g_os", 3)
    fits = np.array([1, -2, 2**31 - 1, 4, 5], np.int64)
    ocp.PyTreeCheckpointer().save(tmp_path / "fits", own.replace(rng=fits))
    with pytest.raises(gshard.GShardError, match="rng is int32.* int64\n.*cast=True"):
        gshard.import_orbax(tmp_path / "fits", like)
    new = gshard.import_orbax(tmp_path / "fits", like, cast=True)
    np.testing.assert_array_equal(plan.unwrap(new).rng, fits)
    ocp.PyTreeCheckpointer().save(tmp_path / "large", own.replace(rng=fits + 1))
    with pytest.raises(gshard.GShardError, match="rng holds integers that do not fit int32"):
        gshard.import_orbax(tmp_path / "large", like, cast=True)
    ocp.PyTreeCheckpointer().save(tmp_path / "steps", own.replace(step=2**31))
    with pytest.raises(gshard.GShardError, match="step holds integers that do not fit int32"):
        gshard.import_orbax(tmp_path / "steps", like)


def test_integers_of_another_dtype_are_converted(tmp_path):
    params = {"w": np.ones((8, 4), np.float32), "table": np.arange(16, dtype=np.int64)}
    sgd = optax.sgd(0.1)
    plain = TrainState(
        step=np.int32(3), apply_fn=None, params=params, tx=sgd, opt_state=sgd.init(params)
    )
    ocp.PyTreeCheckpointer().save(tmp_path / "old", plain)
    own = {**params, "table": np.zeros(16, np.int32)}
    like, _ = shard(TrainState.create(apply_fn=None, params=own, tx=sgd), "p_g_os", 3)
    with pytest.raises(gshard.GShardError, match="Pass cast=True to convert them"):
        gshard.import_orbax(tmp_path / "old", like)
    new = gshard.import_orbax(tmp_path / "old", like, cast=True)
    np.testing.assert_array_equal(gshard.full_params(new)["table"], np.arange(16))


def test_a_state_with_fp8_statistics(tmp_path):
    params = {
        "params": {"w": np.arange(32, dtype=np.float32).reshape(8, 4)},
        "_overwrite_with_gradient": {"w": {"scale": np.full(1, 3, np.float32)}},
    }
    plain = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    ocp.PyTreeCheckpointer().save(tmp_path / "old", plain)
    like, plan = shard(plain.replace(params=jax.tree.map(np.zeros_like, params)), "p_g_os", 3)
    new = gshard.import_orbax(tmp_path / "old", like)
    assert_equal_bits(values(plan.unwrap(new)), values(plain) | steps(plain))
