"""Checkpoints: any level and mesh to any other, exactly; what cannot be restored says why."""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
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
from gshard._util.errors import OutsideError
from gshard.checkpoint import orbax, restore, save
from gshard.checkpoint.disk import Disk
from gshard.checkpoint.local import store as local_store
from gshard.checkpoint.retention import RetentionPolicy
from tests.covering import covering
from tests.tiers import quick
from tests.zoo import SEGMENT_SIZE, ZOO

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]

LEVELS = ("dp", "os", "os_g", "p_g_os")
DEVICES = (1, 2, 4, 8)
PLACES = [(level, devices) for level in LEVELS for devices in DEVICES]
ROWS = 840  # divides over 1 to 8


def tx():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-5))


def shard(state, level, devices, **how):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(state, mesh, level, **{"min_shard_size": SEGMENT_SIZE} | how)


class Training:
    """A model of the zoo that trains at a level, on as many devices, from one set of parameters."""

    def __init__(self, level, devices, name="linen_mlp", **how):
        self.model = ZOO[name]
        self.state, self.plan = shard(self.model.state(tx()), level, devices, **how)
        self._step = gshard.make_train_step(self.model.loss, self.plan)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for i in steps:
            batch = self.model.batch(0, ROWS, i)
            if self.model.kind == "nnx":
                metrics = self._step(*self.state, batch)
            else:
                self.state, metrics = self._step(self.state, batch)
            losses.append(float(metrics["loss"]))
        return losses

    def whole(self) -> dict[str, np.ndarray]:
        """Every array, of the plain state that this one stands for."""
        plain = self.plan.unwrap(self.state)
        return values(plain)


def values(state: Any) -> dict[str, np.ndarray]:
    tree = nnx.state(state) if isinstance(state, tuple) else state
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): data(x) for path, x in pairs}


def data(x: Any) -> np.ndarray:
    key = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def assert_equal_bits(found, expected):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        assert found[path].dtype == x.dtype and found[path].shape == x.shape, path
        assert found[path].tobytes() == x.tobytes(), path


# ---- any level and mesh to any other ---------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(level, devices)`: a checkpoint of step 3, what it holds, and what comes after."""

    @functools.cache
    def of(level, devices):
        run = Training(level, devices)
        run.train(0, 1, 2)
        directory = tmp_path_factory.mktemp(f"{level}-{devices}")
        with gshard.Checkpointer(directory) as checkpointer:
            checkpointer.save(3, run.state)
            held = run.whole()
            after = run.train(3, 4)  # donated arrays, while the save is on its way
        return directory, held, after

    return of


# Every level and every number of devices, on both sides.
QUICK = [(a, PLACES[(5 * i + 6) % len(PLACES)]) for i, a in enumerate(PLACES) if i % 3 == 0]
# Each level restored into each other, from each number of devices and to each.
RESTORES = [
    ((x["from level"], x["from devices"]), (x["level"], x["devices"]))
    for x in covering(
        3, {"from level": LEVELS, "from devices": DEVICES, "level": LEVELS, "devices": DEVICES}
    )
]


@pytest.mark.parametrize(("origin", "target"), quick(dict.fromkeys([*QUICK, *RESTORES]), QUICK))
def test_from_any_level_and_mesh_to_any_other(saved, origin, target):
    directory, held, after = saved(*origin)
    run = Training(*target)
    run.train(7)  # other values and moments than those that are restored
    run.state = gshard.Checkpointer(directory).restore(like=run.state).state
    assert_equal_bits(run.whole(), held)
    for x, want in zip(
        jax.tree.leaves(run.plan.kind.split(run.state)),
        jax.tree.leaves(run.plan.abstract_components()),
        strict=True,
    ):
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim) and x.shape == want.shape
    np.testing.assert_allclose(run.train(3, 4), after, rtol=2e-6)


@pytest.mark.parametrize("devices", quick([3, 5, 7], [5]))
def test_padded_on_both_sides(tmp_path, devices):
    run = Training("p_g_os", devices, "linen_mlp")
    run.train(0)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.state)
    other = Training("os_g", {3: 5, 5: 7, 7: 3}[devices], run.model.name)
    other.state = gshard.Checkpointer(tmp_path).restore(like=other.state).state
    assert_equal_bits(other.whole(), run.whole())


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_a_resumed_run_is_one_that_never_stopped(tmp_path, level):
    run = Training(level, 4)
    run.train(*range(3))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, run.state)
    losses = run.train(*range(3, 23))
    never_saved = Training(level, 4)
    assert never_saved.train(*range(23))[3:] == losses  # saving changed nothing
    again = Training(level, 4)
    again.state = gshard.Checkpointer(tmp_path).restore(like=again.state).state
    assert again.train(*range(3, 23)) == losses
    assert_equal_bits(again.whole(), run.whole())
    for other in {"dp", "p_g_os"} - {level}:
        elsewhere = Training(other, 4)
        elsewhere.state = gshard.Checkpointer(tmp_path).restore(like=elsewhere.state).state
        np.testing.assert_allclose(elsewhere.train(*range(3, 23)), losses, rtol=1e-6)


def test_what_is_saved_is_what_was_there(tmp_path):
    """Large arrays, overwritten in their own memory while they are on their way to the disk."""
    x = np.random.default_rng(0).normal(size=(2048, 1024)).astype(np.float32)
    state = TrainState.create(apply_fn=None, params={"x": x}, tx=optax.sgd(1.0))
    for level in ("dp", "p_g_os"):
        state_now, plan = shard(state, level, 4)
        step = gshard.make_train_step(lambda p, b: jnp.sum(p["x"]) * jnp.mean(b), plan)
        with gshard.Checkpointer(tmp_path / level) as checkpointer:
            checkpointer.save(0, state_now)
            for _ in range(5):
                state_now, _ = step(state_now, np.ones(4, np.float32))
            new = checkpointer.restore(like=state_now).state
        assert (gshard.full_params(new)["x"] == x).all()
        assert (gshard.full_params(state_now)["x"] == x - 5).mean() > 0.9


@pytest.mark.filterwarnings("ignore:.*is only in")
@pytest.mark.parametrize("module, name", [(orbax, "write"), (local_store, "write_shards")])
def test_what_is_offloaded_is_written_from_a_copy(tmp_path, monkeypatch, module, name):
    """On a GPU no step can reuse memory that a thread still reads."""
    write, given = getattr(module, name), set()

    def noted(folder, arrays, *more):
        for x in arrays.values():
            given.update([x.ctypes.data] if isinstance(x, np.ndarray) else buffers(x))
        return write(folder, arrays, *more)

    monkeypatch.setattr(module, name, noted)
    run = Training("os_g", 4, offload=True)
    where = {"every": 100, "local": tmp_path / "local", "local_every": 1}
    where = where if module is local_store else {}
    with gshard.Checkpointer(tmp_path / "run", **where) as checkpointer:
        held = run.whole()
        checkpointer.save(1, run.state)
        leaves = jax.tree.leaves(run.state)
        offloaded = [x for x in leaves if x.sharding.memory_kind == "pinned_host"]
        assert offloaded and given.isdisjoint(address for x in offloaded for address in buffers(x))
        run.train(0)
        run.state = checkpointer.restore(like=run.state).state
    assert_equal_bits(run.whole(), held)


def buffers(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


# ---- kinds of states -----------------------------------------------------------------------------


class Noisy(nnx.Module):
    """Batch statistics, dropout with its key and count, and a buffer without elements."""

    def __init__(self, rngs):
        self.first = nnx.Linear(7, 26, rngs=rngs)
        self.norm = nnx.BatchNorm(26, rngs=rngs, axis_name=None)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(26, 1, rngs=rngs)
        self.nothing = nnx.Variable(jnp.zeros((0, 3)))

    def __call__(self, x):
        return self.last(self.drop(jax.nn.gelu(self.norm(self.first(x)))))


def noisy_loss(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def noisy_batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(ROWS, 7)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


@pytest.mark.filterwarnings("ignore:.*BatchNorm", "ignore:.*compute.* together")
@pytest.mark.parametrize(
    "how",
    [{}, {"precision": "bfloat16"}, {"precision": "bfloat16", "offload": True}],
    ids=["plain", "bfloat16", "offloaded"],
)
def test_nnx_with_statistics_keys_and_counts(tmp_path, how):
    def pair():
        model = Noisy(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx(), wrt=nnx.Param)

    (model, optimizer), plan = shard(pair(), "p_g_os", 4, **how)
    step = gshard.make_train_step(noisy_loss, plan)
    for i in range(2):
        step(model, optimizer, noisy_batch(i))
    checkpointer = gshard.Checkpointer(tmp_path)
    checkpointer.save(2, (model, optimizer))
    after = [float(step(model, optimizer, noisy_batch(i))["loss"]) for i in (2, 3)]

    abstract, plan = shard(nnx.eval_shape(pair), "p_g_os", 4, **how)
    for like in ((abstract, plan), shard(pair(), "p_g_os", 4, **how)[0]):
        new = checkpointer.restore(like=like).state
        assert (new is like) == (like[1] is not plan)  # a concrete pair is changed in place
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(new[1]))}
        assert ("pinned_host" in kinds) == bool(how.get("offload"))
        again = gshard.make_train_step(noisy_loss, new[1].tx.plan)
        assert [float(again(*new, noisy_batch(i))["loss"]) for i in (2, 3)] == after
    checkpointer.close()


class Fields(TrainState):
    batch_stats: Any = None
    rng: Any = None
    ema: Any = None


def fields():
    norm = nn.BatchNorm(use_running_average=True)
    layers = nn.Sequential([nn.Dense(26), norm, nn.gelu, nn.Dense(1)])
    variables = layers.init(jax.random.key(0), jnp.zeros((1, 7)))
    params = variables["params"]
    return Fields.create(
        apply_fn=layers.apply,
        params=params,
        tx=tx(),
        batch_stats=variables["batch_stats"],
        rng=jax.random.key(7, impl="rbg"),
        ema=jax.tree.map(lambda x: x + 1, params),
    )


@pytest.mark.parametrize("frozen", [None, "layers_0"])
def test_linen_with_statistics_keys_averages_and_frozen_parameters(tmp_path, frozen):
    state, plan = shard(fields(), "p_g_os", 3, frozen=frozen)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        zeros = fields()
        zeros = zeros.replace(
            params=jax.tree.map(jnp.zeros_like, zeros.params), rng=jax.random.key(0, impl="rbg")
        )
        like, other = shard(zeros, "os", 2, frozen=frozen)
        new = checkpointer.restore(like=like).state
        assert type(new) is Fields and new.apply_fn == like.apply_fn
    assert_equal_bits(values(other.unwrap(new)), values(plan.unwrap(state)))


def test_with_and_without_master_copies(tmp_path):
    exact = Training("os_g", 4)
    exact.train(0)
    rounded = Training("p_g_os", 2, precision="bfloat16")
    rounded.train(0)
    with gshard.Checkpointer(tmp_path / "exact") as checkpointer:
        checkpointer.save(1, exact.state)
        new = checkpointer.restore(like=rounded.state).state
        checkpointer.save(1, new)
        found = gshard.full_params(new)  # the master copies
        for x, y in zip(
            *map(jax.tree.leaves, (found, gshard.full_params(exact.state))), strict=True
        ):
            assert x.dtype == np.float32 and (x == y).all()
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(new.params))
    with gshard.Checkpointer(tmp_path / "rounded") as checkpointer:
        checkpointer.save(1, rounded.state)
        new = checkpointer.restore(like=Training("dp", 3).state).state
        checkpointer.save(1, new)  # it is what was saved, in another form
        expected = jax.tree.leaves(gshard.full_params(rounded.state))
        for x, y in zip(jax.tree.leaves(new.params), expected, strict=True):
            assert (np.asarray(x) == y).all()


@pytest.mark.filterwarnings("ignore:.*stays* whole")
def test_a_model_wrapped_as_in_paddle(tmp_path):
    def wrapped(level):
        model = nnx.Linear(7, 26, rngs=nnx.Rngs(0))
        return gshard.paddle.group_sharded_parallel(model, tx(), level, segment_size=16)[:2]

    def loss(model, batch):
        return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

    def steps(model, optimizer, *numbers):
        losses = []
        for i in numbers:
            losses.append(float(model.backward(loss, noisy_batch(i))))
            optimizer.step()
            optimizer.clear_grad()
        return losses

    model, optimizer = wrapped("p_g_os")
    steps(model, optimizer, 0)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with model.no_sync():
            model.backward(loss, noisy_batch(0))
        with pytest.raises(gshard.GShardError, match="no_sync"):
            checkpointer.save(1, (model, optimizer))
        optimizer.clear_grad()
        checkpointer.save(1, (model, optimizer))
        after = steps(model, optimizer, 1, 2)
        pair = wrapped("p_g_os")
        with pair[0].no_sync():
            pair[0].backward(loss, noisy_batch(3))
        for how in ({}, {"only": "."}):  # they would be added to those of the restored weights
            with pytest.raises(gshard.GShardError, match="no_sync.*clear_gradients"):
                checkpointer.restore(like=pair, **how)
            with pytest.raises(gshard.GShardError, match="no_sync.*clear_gradients"):
                checkpointer.restore(like=(pair, pair[1].plan), **how)
        pair[0].clear_gradients()
        assert checkpointer.restore(like=pair).state[0] is pair[0]
        assert steps(*pair, 1, 2) == after


def test_unreduced_gradients_are_not_saved(tmp_path):
    class Holding(TrainState):
        waiting: Any = None

    model = ZOO["linen_mlp"]
    bare, plan = shard(model.state(tx()), "os", 2)
    gradient = gshard.value_and_grad(model.loss, plan, sync=False)
    _, unreduced = jax.jit(gradient)(bare.params, model.batch(0, ROWS, 0))
    holding = Holding(**vars(bare), waiting=unreduced)
    with pytest.raises(gshard.GShardError, match="LocalGradients"):
        gshard.Checkpointer(tmp_path).save(0, holding)
    assert gshard.Checkpointer(tmp_path).all_steps() == []


# ---- data, metadata, steps -----------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4])
def test_the_data_goes_on_where_it_was(tmp_path, devices):
    x = np.arange(960, dtype=np.float32).reshape(240, 4)

    def loader(count):
        _, plan = shard(ZOO["linen_mlp"].state(tx()), "os", count)
        return gshard.DataLoader({"x": x}, 24, plan, seed=3, num_epochs=2)

    first, run = loader(2), Training("os", 2)
    batches = iter(first)
    for _ in range(13):
        next(batches)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(13, run.state, data_state=first.state_dict(), metadata={"loss": 1.5})
        rest = [np.asarray(batch["x"]) for batch in batches]
        restored = checkpointer.restore(like=run.state)
        assert (restored.step, restored.metadata) == (13, {"loss": 1.5})
        second = loader(devices)
        second.load_state_dict(restored.data_state)
        again = [np.asarray(batch["x"]) for batch in second]
    assert len(rest) == 7 and all((a == b).all() for a, b in zip(rest, again, strict=True))


def test_metadata_is_json_and_scalar_arrays_are_numbers(tmp_path):
    run = Training("os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        given = {"loss": jnp.float32(0.5), "n": np.int64(3), "deep": {"text": ["ä", None, True]}}
        checkpointer.save(0, run.state, metadata=given, data_state=b"\x00\xffgrain")
        checkpointer.wait()
        found = {"loss": 0.5, "n": 3, "deep": {"text": ["ä", None, True]}}
        assert checkpointer.metadata() == checkpointer.metadata(0) == found
        assert checkpointer.restore(like=run.state).data_state == b"\x00\xffgrain"
        for bad in ({"x": np.zeros(3)}, {"x": object()}, [1], {1: 2}, {"a": {2: 3}}, {"x": {1, 2}}):
            with pytest.raises(gshard.GShardError, match="metadata"):
                checkpointer.save(1, run.state, metadata=bad)
        with pytest.raises(gshard.GShardError, match="data_state"):
            checkpointer.save(1, run.state, data_state=object())
        assert checkpointer.all_steps() == [0]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (dict(), [0, 1, 2, 3, 4, 5, 6]),
        (dict(last=2), [5, 6]),
        (dict(every=3), [0, 3, 6]),
        (dict(last=1, every=2), [0, 2, 4, 6]),
        (dict(best=2), [2, 4, 6]),
        (dict(best=2, mode="max"), [1, 5, 6]),
        (dict(last=2, best=1), [4, 5, 6]),
        (dict(best=1, metric="accuracy", mode="max"), [6]),
    ],
)
def test_which_steps_stay(rules, kept):
    losses = [None, 5.0, 1.0, float("nan"), 0.5, 4.0, 3.0]
    metadata = {i: {} if x is None else {"loss": x} for i, x in enumerate(losses)}
    policy = RetentionPolicy(**rules)
    assert [i for i in range(7) if i not in policy.to_delete(metadata)] == kept


def test_numbers_of_steps_may_be_unsigned(tmp_path, run):
    rules = dict(every=np.uint8(2), keep_last=np.uint64(2), keep_every=np.uint8(200))
    with gshard.Checkpointer(tmp_path, **rules) as checkpointer:
        for step in (0, 1, 2, 3, 298, 300):
            checkpointer.save(step, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [0, 298, 300]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equally_good_steps_the_newest_stay(mode):
    worse = {"min": 2.0, "max": 0.5}[mode]
    metadata = {i: {"loss": x} for i, x in enumerate([worse, 1.0, 1.0, 1.0, worse, worse])}
    assert RetentionPolicy(best=2, mode=mode).to_delete(metadata) == [0, 1, 4]


def test_a_process_killed_while_it_deletes_leaves_no_part_of_a_step(tmp_path):
    """The kill comes with the first file."""
    files = [tmp_path / "3" / name for name in ("a", "b")]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"x")
    script = f"""
import os, pathlib, signal, sys
from gshard.checkpoint.disk import Disk
sys.addaudithook(lambda event, _: event in ("os.remove", "os.rmdir") and os.kill(os.getpid(), 9))
Disk(pathlib.Path({str(tmp_path)!r})).delete(3)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "3").exists()
    assert list(tmp_path.rglob("b"))  # it was killed before the end
    assert gshard.Checkpointer(tmp_path).all_steps() == []


def test_old_steps_go_after_a_new_one_is_there(tmp_path):
    run = Training("os", 2)
    with gshard.Checkpointer(tmp_path, keep_last=2, keep_every=4, keep_best=1) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, run.state, metadata={"loss": abs(step - 3)})
    assert gshard.Checkpointer(tmp_path).all_steps() == [3, 4, 6, 7]
    assert {x.name for x in tmp_path.iterdir()} == {"3", "4", "6", "7", ".gshard_lock"}
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.delete(6)
        assert checkpointer.all_steps() == [3, 4, 7]


def test_the_step_that_was_saved_last_is_not_written_again(tmp_path, run):
    """As by a job that gets SIGTERM right after it has saved."""
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, run.state)
        checkpointer.wait()
        before = (tmp_path / "5" / "gshard.json").stat()
        checkpointer.save(5, run.state)
        checkpointer.save(5, run.state)
        assert (tmp_path / "5" / "gshard.json").stat() == before
        with pytest.raises(gshard.GShardError, match="not after the newest"):
            checkpointer.save(4, run.state)
        checkpointer.delete(5)
        checkpointer.save(5, run.state)
        run.state = checkpointer.restore(like=run.state).state
        run.train(0)
        with pytest.raises(gshard.GShardError, match="another state under this number"):
            checkpointer.save(5, run.state)
    assert checkpointer.all_steps() == [5]


def test_the_step_that_was_restored_is_not_written_again(tmp_path, run):
    """As by a job that gets SIGTERM before its first step."""
    with gshard.Checkpointer(tmp_path) as checkpointer:
        for number in (4, 5):
            checkpointer.save(number, run.state, data_state={"at": number}, metadata={"n": number})
    before = (tmp_path / "5" / "gshard.json").stat()
    with gshard.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(like=run.state)
        checkpointer.save(5, restored.state, data_state=restored.data_state)
        assert (tmp_path / "5" / "gshard.json").stat() == before
        with pytest.raises(gshard.GShardError, match="this state with other data_state"):
            checkpointer.save(5, restored.state, data_state={"at": 0})
        checkpointer.restore(4, like=run.state)
        with pytest.raises(gshard.GShardError, match="not after the newest one, 5"):
            checkpointer.save(4, restored.state)


def test_what_was_restored_is_not_read_once_more_to_be_compared(tmp_path, run, monkeypatch):
    """A job that is told to stop before its first step has little time for its last save."""
    compared = []
    read = save.read_one_by_one

    def reading(one, stored, plan, arrays):
        compared.append({*arrays})
        return read(one, stored, plan, arrays)

    monkeypatch.setattr(save, "read_one_by_one", reading)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, run.state)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(like=run.state)
        checkpointer.save(5, restored.state)
        assert compared.pop() == set()
        other = restored.state.replace(params=jax.tree.map(jnp.copy, restored.state.params))
        checkpointer.save(5, other)
        assert len(compared.pop()) == len(jax.tree.leaves(other.params))
        checkpointer.restore(like=run.state, only=".")  # for an evaluation
        checkpointer.save(5, restored.state)
    assert checkpointer.all_steps() == [5]


def test_a_step_that_was_restored_instead_of_a_damaged_one_is_not_written_again(tmp_path, run):
    with gshard.Checkpointer(tmp_path) as checkpointer:
        for number in (4, 5):
            checkpointer.save(number, run.state)
    (tmp_path / "5" / "gshard.json").write_text("{}")
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(gshard.GShardWarning, match="Step 4 is restored instead"):
            restored = checkpointer.restore(like=run.state)
        checkpointer.save(4, restored.state)
        with pytest.warns(gshard.GShardWarning, match="the damaged step 5 is now"):
            checkpointer.save(6, restored.state)
    assert checkpointer.all_steps() == [4, 6]


def test_another_state_under_the_number_saved_last_is_refused(tmp_path):
    run = Training("os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, run.state)
        saved = run.whole()
        run.train(0)
        with pytest.raises(gshard.GShardError, match="another state.*: params.*delete\\(5\\)"):
            checkpointer.save(5, run.state)
        run.state = checkpointer.restore(like=run.state).state
        assert_equal_bits(run.whole(), saved)
        assert checkpointer.all_steps() == [5]


def test_another_data_state_or_metadata_of_the_step_saved_last_is_refused(tmp_path, run):
    with gshard.Checkpointer(tmp_path) as checkpointer:
        given = {"data_state": {"position": 5}, "metadata": {"loss": float("nan")}}
        checkpointer.save(5, run.state, **given)
        for same in ({}, given, {"metadata": given["metadata"]}):
            checkpointer.save(5, run.state, **same)
        for name, other in (("data_state", {"position": 6}), ("metadata", {"loss": 1.0})):
            with pytest.raises(gshard.GShardError, match=f"with other {name}.*delete\\(5\\)"):
                checkpointer.save(5, run.state, **given | {name: other})
        assert checkpointer.restore(like=run.state).data_state == {"position": 5}


def test_the_same_values_in_other_arrays_are_the_same_state(tmp_path):
    run = Training("p_g_os", 4)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, run.state)
        checkpointer.save(5, jax.tree.map(jnp.copy, run.state))
        checkpointer.delete(5)
        checkpointer.save(6, run.state)
    assert checkpointer.all_steps() == [6]


def test_after_a_skipped_step_the_state_counts_as_the_same(tmp_path):
    """A loop that saves by `state.step` meets the number of the last save again."""
    params = {"w": np.ones((8, 64), np.float32)}
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-2)), gshard.make_mesh(), "os", min_shard_size=0
    )
    step = gshard.make_train_step(lambda p, batch: (batch @ p["w"]).mean(), plan)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        for value in (1.0, np.nan, 1.0):
            state, _ = step(state, np.full((8, 8), value, np.float32))
            position = {} if np.isnan(value) else None  # it moves on, and the step stays
            checkpointer.save(int(state.step), state, data_state=position)
    assert checkpointer.all_steps() == [1, 2]


def test_a_save_that_is_on_its_way_is_no_step(tmp_path):
    run = Training("os", 2)
    checkpointer = gshard.Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(5, run.state)
    assert checkpointer.latest_step() == 5
    for name in ("9.0a1b2c3d-0.saving", "7.deleted"):
        (tmp_path / name).mkdir()
    others = {"08", "best", "3.my-notes.saving", "9.saving"}
    for name in others:
        (tmp_path / name).mkdir()
    assert checkpointer.all_steps() == [5]
    checkpointer.close()
    with gshard.Checkpointer(tmp_path) as another:
        another.save(6, run.state)
    assert {x.name for x in tmp_path.iterdir()} == {"5", "6", ".gshard_lock"} | others


# ---- bad input -----------------------------------------------------------------------------------


@pytest.fixture
def run():
    return Training("os", 2)


@pytest.fixture
def written(tmp_path, run):
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, run.state)
    return tmp_path / "run"


def everything(directory):
    return {str(x): x.read_bytes() for x in directory.rglob("*") if x.is_file()}


def test_another_model_is_named_leaf_by_leaf(written, run):
    other, _ = shard(fields(), "os", 2)
    checkpointer = gshard.Checkpointer(written)
    before = everything(written)
    with pytest.raises(gshard.GShardError) as refused:
        checkpointer.restore(like=other)
    assert "params/layers_0/kernel is not in the checkpoint" in str(refused.value)
    assert "is only in the checkpoint" in str(refused.value)
    with pytest.raises(gshard.GShardError, match="another model.*Choose another directory"):
        checkpointer.save(30, other)
    wider = jax.tree.map(lambda x: jnp.zeros((*x.shape, 2)), run.plan.unwrap(run.state).params)
    wide, _ = shard(TrainState.create(apply_fn=None, params=wider, tx=tx()), "os", 2)
    with pytest.raises(gshard.GShardError) as refused:
        checkpointer.restore(like=wide)
    path, x = min(
        (jax.tree_util.keystr(p, simple=True, separator="/"), x)
        for p, x in jax.tree_util.tree_leaves_with_path(wide.params)
    )
    shape = x.shape[:-1]
    assert f"params/{path} has the shape {x.shape}, in the checkpoint {shape}" in str(refused.value)
    before.pop(str(written / ".gshard_lock"), None)
    after = everything(written)
    assert all(after[name] == content for name, content in before.items())
    assert checkpointer.all_steps() == [10, 20]


def test_another_optimizer_is_named(written):
    sgd, _ = shard(ZOO["linen_mlp"].state(optax.sgd(0.1, momentum=0.9)), "os", 2)
    with pytest.raises(gshard.GShardError, match=r"(?s)opt_state/inner/.*only='.'"):
        gshard.Checkpointer(written).restore(like=sgd)


def test_another_dtype_needs_cast(written, run):
    half = jax.tree.map(lambda x: x.astype(np.float16), run.plan.unwrap(run.state).params)
    like, _ = shard(TrainState.create(apply_fn=None, params=half, tx=tx()), "os", 2)
    checkpointer = gshard.Checkpointer(written)
    with pytest.raises(
        gshard.GShardError, match="(?s)float16, in the checkpoint float32.*cast=True"
    ):
        checkpointer.restore(like=like)
    new = checkpointer.restore(like=like, cast=True).state
    for x, y in zip(*map(jax.tree.leaves, (new.params, run.state.params)), strict=True):
        assert x.dtype == np.float16 and (np.asarray(x) == np.asarray(y, np.float16)).all()


def test_numbers_too_large_for_the_new_dtype_are_named(tmp_path):
    params = {"w": np.array([1e6, 2, 7e4, np.inf, 3, 4], np.float32), "x": np.ones(6, np.float32)}
    state, _ = shard((params, optax.sgd(0.1)), "os", 2)
    half = jax.tree.map(lambda x: jnp.ones_like(x, jnp.float16), params)
    like, _ = shard((half, optax.sgd(0.1)), "os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        with pytest.warns(gshard.GShardWarning) as seen:
            new = checkpointer.restore(like=like, cast=True).state
    (message,) = {str(x.message) for x in seen}
    assert "params/w has numbers that are too large for float16, which become" in message
    assert np.isinf(np.asarray(new.params["w"])).tolist() == [True, False, True, True, False, False]


@pytest.mark.parametrize("kind", [np.int32, np.bool_, np.complex64])
def test_other_kinds_are_not_cast(tmp_path, kind):
    """NaN would become some integer."""
    params = {"w": np.ones(8, np.float32), "x": np.full(8, np.nan, np.float32)}
    state, _ = shard((params, optax.sgd(0.1)), "os", 2, frozen="x")
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        like, _ = shard((params | {"x": np.ones(8, kind)}, optax.sgd(0.1)), "os", 2, frozen="x")
        with pytest.raises(
            gshard.GShardError, match="(?s)x is .*, in the checkpoint float32.*cast"
        ):
            checkpointer.restore(like=like, cast=True)


def test_steps_that_are_not_there(written, run):
    checkpointer = gshard.Checkpointer(written)
    with pytest.raises(gshard.GShardError, match=r"step=13 is not in .*\[10, 20\]"):
        checkpointer.restore(13, like=run.state)
    for step in (10, 20, 15):  # which another one has written
        with pytest.raises(gshard.GShardError, match="not after the newest one, 20"):
            checkpointer.save(step, run.state)
    for bad in (-1, 1.5, True, "../30", None):
        with pytest.raises(gshard.GShardError, match="step="):
            checkpointer.save(bad, run.state)
    for bad in (-1, 1.5, True, "../run/20"):
        with pytest.raises(gshard.GShardError, match="step="):
            checkpointer.restore(bad, like=run.state)
    assert checkpointer.all_steps() == [10, 20]


def test_directories_that_cannot_be(tmp_path, run):
    (tmp_path / "file").write_text("mine")
    for bad, words in [
        (tmp_path / "file", "is a file"),
        (3, "must be the path"),
        ("", "must be the path"),
        ("ftp://host/run", "gs://, gcs://, s3://, file:/// and paths"),
        ("gs:///run", "names no bucket"),
        (Path("gs://bucket/run"), "lacks a slash"),
        (str(Path("s3://bucket") / "run"), "lacks a slash"),
        (tmp_path / "[0]", r"contains \["),
        (tmp_path / "a*b?c\\d", r"contains \* \? \\"),
    ]:
        with pytest.raises(gshard.GShardError, match=words):
            gshard.Checkpointer(bad)
    with pytest.raises(gshard.SaveFailedError, match="Not a directory"):
        gshard.Checkpointer(tmp_path / "file" / "below").save(1, run.state)
    assert (tmp_path / "file").read_text() == "mine"
    empty = gshard.Checkpointer(tmp_path / "nothing")
    assert empty.latest_step() is None and empty.all_steps() == []
    for call in (lambda: empty.restore(like=run.state), empty.verify, empty.metadata):
        with pytest.raises(gshard.GShardError, match="does not exist|holds no checkpoint"):
            call()


def test_the_folder_of_a_step_is_no_directory_of_steps(written, run):
    """Its next save would write into the step, which then counts as damaged."""
    with pytest.raises(
        gshard.GShardError, match="is step 20 of the checkpoints in .*restore.step=20"
    ):
        gshard.Checkpointer(written / "20")
    assert gshard.Checkpointer(written).verify(20) == []


@pytest.mark.parametrize("name", ["../steps", "a/../steps", "link/../steps", "run #1 50% ü&+=~"])
def test_a_folder_with_an_unusual_path(tmp_path, run, monkeypatch, name):
    """The parent of a link is that of its target, as for other programs."""
    (tmp_path / "here" / "a").mkdir(parents=True)
    (tmp_path / "far" / "target").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "target")
    monkeypatch.chdir(tmp_path / "here")
    with gshard.Checkpointer(name) as checkpointer:
        checkpointer.save(1, run.state)
    assert os.path.isdir(f"{name}/1")
    with gshard.Checkpointer(name) as checkpointer:
        assert checkpointer.restore(like=run.state).step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_no_permission(tmp_path, run, monkeypatch):
    if os.geteuid() == 0:  # whom nothing is forbidden

        def refuse(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(gshard.SaveFailedError, match="Permission denied"):
        gshard.Checkpointer(tmp_path / "run").save(1, run.state)


def test_arguments_that_cannot_be(tmp_path, run, written):
    for bad in (
        dict(keep_last=0), dict(keep_every=-1), dict(keep_best=1.5), dict(mode="least"),
        dict(metric=3), dict(asynchronous="yes"), dict(on_failure="ignore"),
    ):  # fmt: skip
        with pytest.raises(gshard.GShardError, match=next(iter(bad))):
            gshard.Checkpointer(tmp_path, **bad)
    checkpointer = gshard.Checkpointer(written)
    plain = run.plan.unwrap(run.state)
    for call in (lambda: checkpointer.save(30, plain), lambda: checkpointer.restore(like=plain)):
        with pytest.raises(gshard.GShardError, match="shard_train_state"):
            call()
    for bad in (None, 3, (run.state, 3)):
        with pytest.raises(gshard.GShardError, match="restore"):
            checkpointer.restore(like=bad)
    for bad in (dict(verify=1), dict(cast="yes")):
        with pytest.raises(gshard.GShardError, match=next(iter(bad))):
            checkpointer.restore(like=run.state, **bad)
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(30, run.state),
        lambda: checkpointer.restore(like=run.state),
        lambda: checkpointer.delete(10),
    ):
        with pytest.raises(gshard.CallOrderError, match="closed"):
            call()


def test_a_state_that_was_given_away(tmp_path):
    run = Training("os", 2)
    old = run.state
    run.train(0)
    with pytest.raises(gshard.DonatedStateError, match="earlier step"):
        gshard.Checkpointer(tmp_path).save(0, old)


def test_two_writers_of_one_directory(written, run):
    first, second = gshard.Checkpointer(written), gshard.Checkpointer(written)
    first.save(30, run.state)
    with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
        second.save(40, run.state)
    first.close()
    second.save(40, run.state)
    second.close()
    assert second.all_steps() == [10, 20, 30, 40]


@pytest.mark.parametrize(("by", "said"), [(1, "later gshard"), (-1, "this version cannot read")])
def test_another_format_is_refused_in_words(written, run, by, said):
    about = written / "20" / "gshard.json"
    table = json.loads(about.read_text())
    about.write_text(json.dumps(table | {"format": table["format"] + by}))
    with pytest.raises(gshard.GShardError, match=said):
        gshard.Checkpointer(written).restore(20, like=run.state, verify=False)


def test_a_planted_pickle_is_not_opened(written, run):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    for name in ("checkpoint", "state.pkl", "arrays/_METADATA.pickle"):
        (written / "20" / name).write_bytes(pickle.dumps(Trap()))
    opened = []
    sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
    checkpointer = gshard.Checkpointer(written)
    checkpointer.restore(20, like=run.state, verify=False)
    with pytest.warns(gshard.GShardWarning, match="not of this step.*state.pkl"):
        assert checkpointer.restore(like=run.state).step == 20
    assert any("gshard.json" in path for path in opened)
    assert not any(path.endswith(("checkpoint", ".pkl", ".pickle")) for path in opened)


def test_a_manifest_cannot_name_what_is_outside(written):
    from gshard.checkpoint.checksums import find_damages
    from gshard.checkpoint.manifest import sealed
    from gshard.checkpoint.step_files import StepFolder

    (written / "secret").write_text("x")
    for name in ("../secret", str(written / "secret"), "a/../../secret"):
        (written / "20" / "manifest.json").write_bytes(sealed({name: []}))
        assert [x.file for x in find_damages(StepFolder(written / "20"))] == ["manifest.json"]


# ---- what others do in the directory -------------------------------------------------------------


def test_folders_of_others_are_no_steps(tmp_path, run):
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "mine").write_text("mine")
    with gshard.Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.all_steps() == []
        for step in (1, 2):
            checkpointer.save(step, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [2]
        for act in (lambda: checkpointer.delete(2024), lambda: checkpointer.save(2024, run.state)):
            with pytest.raises(gshard.GShardError, match="2024"):
                act()
    assert (tmp_path / "2024" / "mine").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_step_that_cannot_be_looked_at_is_not_absent(tmp_path, monkeypatch, code):
    """Else a script would train from the beginning."""
    (tmp_path / "5").mkdir()
    checkpointer = gshard.Checkpointer(tmp_path)
    assert checkpointer.latest_step() is None
    lstat = Path.lstat

    def fails(path):
        if path.suffix == ".json":
            raise OSError(code, os.strerror(code), str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", fails)
    words = f"5/manifest.json cannot be read: {os.strerror(code)}. If .*, move it away"
    with pytest.raises(OutsideError, match=words):
        checkpointer.latest_step()


def test_a_copied_folder_is_not_the_step_that_its_name_says(written, run):
    shutil.copytree(written / "10", written / "30")
    checkpointer = gshard.Checkpointer(written)
    assert [str(x) for x in checkpointer.verify(30)] == [
        "gshard.json is of step 10: the folder was renamed or copied"
    ]
    with pytest.warns(gshard.GShardWarning, match="is of step 10"):
        assert checkpointer.restore(like=run.state).step == 20


def test_the_best_steps_need_their_metric(tmp_path, run):
    with gshard.Checkpointer(tmp_path, keep_best=1) as checkpointer:
        checkpointer.save(1, run.state, metadata={"loss": float("nan")})
        for bad in (None, {"val_loss": 1.0}, {"loss": "0.5"}, {"loss": [1.0]}):
            with pytest.raises(gshard.GShardError, match="needs the number 'loss' in metadata"):
                checkpointer.save(2, run.state, metadata=bad)
        checkpointer.save(2, run.state, metadata={"loss": 10**400})
    assert checkpointer.all_steps() == [2]


def test_a_directory_that_is_deleted_is_made_again(tmp_path, run):
    with gshard.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, run.state)
        shutil.rmtree(tmp_path / "run")
        checkpointer.save(2, run.state)
        with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
            gshard.Checkpointer(tmp_path / "run").save(3, run.state)
        assert checkpointer.all_steps() == [2]


def test_a_step_that_goes_while_it_is_read_is_looked_for_again(written, run, monkeypatch):
    """As next to a training that keeps the newest alone."""
    from gshard.checkpoint import checksums

    checkpointer, compare = gshard.Checkpointer(written), checksums.find_damages

    def deleting(step, *rest):
        if step.name == "20":
            shutil.rmtree(step.path)
        return compare(step, *rest)

    monkeypatch.setattr(checksums, "find_damages", deleting)
    assert checkpointer.restore(like=run.state).step == 10  # and no warning
    shutil.copytree(written / "10", written / "20")
    for act in (lambda: checkpointer.restore(20, like=run.state), lambda: checkpointer.verify(20)):
        with pytest.raises(gshard.GShardError, match="deleted"):
            act()
        shutil.copytree(written / "10", written / "20")


@pytest.mark.parametrize("verify", [True, False])
def test_a_data_state_that_goes_before_it_is_read_is_not_taken_for_none(
    tmp_path, run, monkeypatch, verify
):
    read = restore.read_data_state

    def deleting(step, processes):
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return read(step, processes)

    with gshard.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, run.state, data_state={"at": step})
        checkpointer.wait()
        shutil.copytree(tmp_path / "2", tmp_path / "copy")
        monkeypatch.setattr(restore, "read_data_state", deleting)
        restored = checkpointer.restore(like=run.state, verify=verify)
        assert (restored.step, restored.data_state) == (1, {"at": 1})
        (tmp_path / "copy").rename(tmp_path / "2")
        with pytest.raises(gshard.GShardError, match="step 2 was deleted from .* while it was re"):
            checkpointer.restore(2, like=run.state, verify=verify)


def test_frozen_or_not_on_either_side(tmp_path):
    def state(frozen, seed):
        model = ZOO["linen_mlp"].state(optax.sgd(0.1), seed=seed)
        return shard(model, "os", 2, frozen=frozen)[0]

    for i, (before, after) in enumerate([(None, "Dense_0"), ("Dense_0", None)]):
        first, second = state(before, 0), state(after, 1)
        with gshard.Checkpointer(tmp_path / str(i)) as checkpointer:
            checkpointer.save(1, first)
            new = checkpointer.restore(like=second).state
            for x, y in zip(*map(jax.tree.leaves, (new.params, first.params)), strict=True):
                assert (np.asarray(x) == np.asarray(y)).all()
            checkpointer.save(2, new)


@pytest.mark.parametrize("params", [{"a": {"": np.ones((8, 4))}}, {"a/": np.ones((8, 4))}])
def test_names_that_could_not_be_restored_are_refused(tmp_path, params):
    state, _ = shard((params, optax.sgd(0.1)), "os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(gshard.GShardError, match="params/a/ are empty or end with a slash"):
            checkpointer.save(1, state)


@pytest.mark.parametrize(
    ("w", "said"),
    [
        (jnp.ones((9, 4)), "float32\\[9, 4\\]"),
        (jnp.ones((8, 3), jnp.bfloat16), "bfloat16\\[8, 3\\]"),
        (np.ones((2, 2)), "float64\\[2, 2\\]"),
        (np.ones((8, 3), np.complex64), "complex64\\[8, 3\\]"),
        (np.full((8, 3), 2**40), "int64\\[8, 3\\]"),
    ],
)
def test_arrays_that_are_not_those_of_the_plan_are_refused(tmp_path, w, said):
    params = {"w": np.ones((8, 3), np.float32)}
    state, _ = shard((params, optax.adam(0.1)), "p_g_os", 5, min_shard_size=0)
    said = f"params/w is {said}, stored as float32\\[10, 3\\].*shard the new parameters"
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(gshard.GShardError, match=said):
            checkpointer.save(1, state.replace(params={"w": w}))
        checkpointer.save(1, state.replace(params=gshard.full_params(state)))  # without padding
        assert gshard.full_params(checkpointer.restore(like=state).state)["w"].all()
        checkpointer.save(2, jax.device_get(state))  # with it
        assert gshard.full_params(checkpointer.restore(like=state).state)["w"].all()
        host = jax.device_get(state.opt_state)  # whose dtype an optimizer may change
        half = jax.tree.map(lambda x: x.astype(np.float16) if x.ndim else x, host)
        state = state.replace(opt_state=half)
        checkpointer.save(3, state.replace(params={"w": np.ones((8, 3))}))  # JAX takes float64 too
        assert gshard.full_params(checkpointer.restore(like=state).state)["w"].all()


class WithField(TrainState):
    w: Any = None


def with_field(field):
    params = {"w": jnp.ones((8, 4))}
    plain = WithField.create(apply_fn=None, params=params, tx=optax.sgd(0.1), w=field)
    return shard(plain, "os", 2, min_shard_size=0)


def test_a_field_with_the_path_of_a_parameter_is_not_taken_for_it(tmp_path):
    state, plan = with_field(jnp.full((8, 4), 7.0))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        assert checkpointer.restore(like=plan).state.w.max() == 7
        for other in (None, jnp.ones(3)):
            with pytest.raises(gshard.GShardError, match="same path as non_trainable/w, so only="):
                checkpointer.restore(like=with_field(other)[1])
    with gshard.Checkpointer(tmp_path / "without") as checkpointer:
        checkpointer.save(1, with_field(None)[0])
        with pytest.raises(gshard.GShardError, match="non_trainable/w is not in the checkpoint"):
            checkpointer.restore(like=plan)  # and does not read the parameter


@pytest.mark.parametrize("stored, own", [("int32", "float32"), ("float32", "int32")])
def test_a_field_that_became_a_number_of_another_kind_is_not_saved(tmp_path, stored, own):
    """What it holds would not be what is restored."""
    state, _ = with_field(jnp.full(3, 7, stored))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(gshard.GShardError, match=rf"w is {own}\[3\], stored as {stored}\[3\]"):
            checkpointer.save(1, state.replace(w=state.w.astype(own)))


def test_inside_jit_there_is_nothing_to_save(tmp_path, run):
    checkpointer = gshard.Checkpointer(tmp_path)
    for act in (
        lambda state: checkpointer.save(1, state),
        lambda state: checkpointer.restore(like=state).state,
    ):
        with pytest.raises(gshard.GShardError, match="inside jax.jit"):
            jax.jit(act)(run.state)


@pytest.mark.parametrize(
    "name", ["gshard.json", "data_state/process_0.json", "arrays/manifest.ocdbt"]
)
def test_damaged_files_that_are_not_compared_are_said_in_words(tmp_path, run, name):
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.state, data_state={"position": 3})
        checkpointer.wait()
        (tmp_path / "1" / name).write_bytes(b"\xff{")
        with pytest.raises(gshard.GShardError, match="damaged|cannot be read"):
            checkpointer.restore(1, like=run.state, verify=False)


def test_a_step_saved_again_after_its_deletion_has_its_new_metric(tmp_path, run, monkeypatch):
    """Of a store that is far away the metrics are kept, and not read again."""
    monkeypatch.setattr(Disk, "is_remote", True)
    with gshard.Checkpointer(tmp_path, keep_last=1, keep_best=1) as checkpointer:

        def save(step, loss):
            checkpointer.save(step, run.state, metadata={"loss": loss, "name": "a"})
            checkpointer.wait()

        save(20, 1.0)
        checkpointer.delete(20)
        for step, loss in ((20, 9.0), (30, 5.0), (40, 7.0)):
            save(step, loss)
        checkpointer.save(40, run.state, metadata={"name": "a", "loss": 7.0})  # in another order
        assert checkpointer.all_steps() == [30, 40] and checkpointer.best_step() == 30
