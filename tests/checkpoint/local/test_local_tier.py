"""The newest steps in a folder of each machine are restored exactly, or not at all."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from gshard.checkpoint.disk import DiskDraft
from gshard.checkpoint.local import reader as local_reader
from gshard.checkpoint.local import store as local_store
from gshard.checkpoint.local.shards import INDEX, SHARDS, read_index
from tests.checkpoint.test_checkpoints import (
    PLACES,
    ROWS,
    Training,
    assert_equal_bits,
    shard,
    values,
)
from tests.processes import clean_environment, run_workers
from tests.tiers import quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


class WithKeys(TrainState):
    keys: Any


@pytest.fixture
def folders(tmp_path):
    return {"directory": tmp_path / "run", "local": tmp_path / "local"}


def opened(folders, **how):
    return gshard.Checkpointer(**{"every": 100, "local_every": 1} | folders | how)


def saved_locally(folders, run, *steps, **how):
    """Trains, and saves each step on the machine alone; returns what the last one held."""
    with pytest.warns(gshard.GShardWarning, match="is only in .*local, so"):
        with opened(folders, **how) as checkpointer:
            for step in steps:
                run.train(step - 1)
                checkpointer.save(step, run.state, data_state={"at": step}, metadata={"m": step})
    return run.whole()


@pytest.mark.parametrize(("level", "devices"), quick(PLACES, [("os", 4)]))
def test_any_level_and_mesh_to_any_other(folders, level, devices):
    run = Training(level, devices)
    held = saved_locally(folders, run, 1, 2)
    after = run.train(2, 3)
    for target in [("dp", 1), ("p_g_os", 3), (level, devices)]:
        other = Training(*target)
        restored = opened(folders).restore(like=other.state)
        assert (restored.step, restored.data_state, restored.metadata) == (2, {"at": 2}, {"m": 2})
        assert restored.source == str(folders["local"])
        other.state = restored.state
        assert_equal_bits(other.whole(), held)
        np.testing.assert_allclose(other.train(2, 3), after, rtol=2e-6)


def test_bfloat16_with_master_copies_and_random_keys(folders):
    """Padded arrays of other dtypes, and an array with more dimensions than it seems to have."""
    params = {"w": jnp.arange(35, dtype=jnp.float32).reshape(7, 5) / 3, "empty": jnp.zeros((0, 3))}
    keys = {"key": jax.random.key(7)}
    plain = WithKeys.create(apply_fn=None, params=params, tx=optax.adam(1e-2), keys=keys)
    how = {"min_shard_size": 0, "precision": gshard.Precision("bf16", "float32")}
    state, plan = shard(plain, "p_g_os", 4, **how)
    with pytest.warns(gshard.GShardWarning, match="is only in"), opened(folders) as checkpointer:
        checkpointer.save(1, state)
    again = jax.tree.map(jnp.zeros_like, params)
    _, plan = shard(
        plain.replace(params=again, keys={"key": jax.random.key(8)}), "p_g_os", 3, **how
    )
    found = plan.unwrap(opened(folders).restore(like=plan).state)
    np.testing.assert_array_equal(found.params["w"], params["w"])
    assert (
        jax.random.key_data(found.keys["key"]).tolist() == jax.random.key_data(keys["key"]).tolist()
    )


def test_a_restored_state_does_not_need_its_files(folders):
    """On a CPU, JAX may keep the memory that it is given, such as that of a mapped file."""
    run = Training("p_g_os", 4)
    held = saved_locally(folders, run, 1, 2)
    restored = opened(folders).restore(like=run.plan).state
    for file in folders["local"].rglob("shards"):
        with file.open("r+b") as opened_file:
            opened_file.write(b"\xff" * file.stat().st_size)
    run.state = restored
    assert_equal_bits(run.whole(), held)
    for file in folders["local"].rglob("shards"):
        os.truncate(file, 0)
    assert_equal_bits(run.whole(), held)


def test_large_arrays_are_copied_by_threads(folders, monkeypatch):
    monkeypatch.setattr(local_reader, "_THREADED", 0)
    run, other = Training("p_g_os", 4), Training("p_g_os", 3)
    held = saved_locally(folders, run, 1)
    other.state = opened(folders).restore(like=other.state).state
    assert_equal_bits(other.whole(), held)


def test_another_dtype_needs_cast(folders):
    params = {"w": np.arange(32, dtype=np.float32).reshape(8, 4) / 3}
    state, _ = shard((params, optax.sgd(0.1)), "p_g_os", 4)
    with pytest.warns(gshard.GShardWarning, match="is only in"), opened(folders) as checkpointer:
        checkpointer.save(1, state)
    half, plan = shard(({"w": params["w"].astype(np.float16)}, optax.sgd(0.1)), "p_g_os", 4)
    with pytest.raises(gshard.GShardError, match="(?s)float16, in the checkpoint float32"):
        opened(folders).restore(like=half)
    new = opened(folders).restore(like=half, cast=True).state
    np.testing.assert_array_equal(gshard.full_params(new)["w"], params["w"].astype(np.float16))
    assert new.params["w"].dtype == np.float16


@pytest.mark.parametrize("step", [1, 100])  # on the machine, and in the directory
def test_no_integer_becomes_another_one(folders, step):
    def made(dtype, n):
        params = {"w": np.ones((8, 4), np.float32), "n": np.array([[n, 1]] * 8, dtype)}
        return shard((params, optax.sgd(0.1)), "os", 4, frozen="^n$")[0]

    with opened(folders) as checkpointer:
        checkpointer.save(step, made(np.int32, 300))
        checkpointer._elsewhere = None  # which is a warning
        with pytest.raises(gshard.GShardError, match="/n holds integers that do not fit int8"):
            checkpointer.restore(like=made(np.int8, 0), cast=True)
        new = checkpointer.restore(like=made(np.uint16, 0), cast=True).state
        found = gshard.full_params(new)["n"]
        assert found.dtype == np.uint16 and found.tolist() == [[300, 1]] * 8
        checkpointer._elsewhere = None


def test_training_goes_on_while_a_step_is_written(folders, monkeypatch):
    run, trained = Training("os_g", 4), threading.Event()
    write = local_store.write_shards
    monkeypatch.setattr(
        local_store, "write_shards", lambda *given: (trained.wait(60), write(*given))
    )
    with pytest.warns(gshard.GShardWarning, match="is only in"), opened(folders) as checkpointer:
        held = run.whole()
        checkpointer.save(1, run.state)
        run.train(0, 1)  # the arrays that are saved are donated
        trained.set()
    run.state = opened(folders).restore(like=run.state).state
    assert_equal_bits(run.whole(), held)


def test_which_steps_are_saved_where(folders):
    run = Training("os", 2)
    local = folders["local"] / "process-0"
    with opened(folders, every=6, local_every=2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step, there, here in (
            (1, [], None),
            (2, [], 2),
            (3, [], 2),
            (4, [], 4),
            (6, [6], 4),
            (8, [6], 8),
            (10, [6], 10),
            (12, [6, 12], 10),
        ):
            checkpointer.save(step, run.state)
            checkpointer.wait()
            assert checkpointer.all_steps() == there
            assert checkpointer.latest_step() == max(
                [*there, *([here] if here else [])], default=None
            )
            steps = [int(x.name) for x in local.glob("[0-9]*")] if local.exists() else []
            assert max(steps, default=None) == here and len(steps) <= 1
        assert checkpointer.restore(like=run.state).step == 12
        assert checkpointer.restore(10, like=run.state).step == 10
        with pytest.raises(gshard.GShardError, match="step=4 is not in .*nearest are"):
            checkpointer.restore(4, like=run.state)
        checkpointer.save(13, run.state)
        checkpointer.save(13, run.state, force=True)
        checkpointer.wait()
        assert checkpointer.all_steps() == [6, 12, 13]


def test_steps_that_are_not_in_the_directory_are_told_at_the_end(folders):
    run = Training("os", 2)
    checkpointer = opened(folders, every=6, local_every=2)
    checkpointer.save(6, run.state)
    checkpointer.save(8, run.state)
    checkpointer.save(9, run.state)
    with pytest.warns(gshard.GShardWarning, match="last step, 9, was not saved, so .*run"):
        checkpointer.close()
    with gshard.Checkpointer(folders["directory"], every=6) as checkpointer:  # no local folder
        checkpointer.save(7, run.state)
        checkpointer.save(12, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [6, 12]
        checkpointer.save(13, run.state)
        checkpointer.restore(12, like=run.state)  # given up, which is no warning


def test_a_preempted_job_saves_whatever_the_number(folders):
    script = f"""
import os, signal, warnings
import gshard
from tests.checkpoint.test_checkpoints import Training
warnings.simplefilter("error", gshard.GShardWarning)
run = Training("dp", 1)
checkpointer = gshard.Checkpointer({str(folders["directory"])!r}, every=100)
def last():
    with checkpointer:
        checkpointer.save(7, run.state)
for i in gshard.distributed.until_preempted(range(100), last=last):
    checkpointer.save(i + 1, run.state)
    if i == 6:
        os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 75, done.stderr
    assert gshard.Checkpointer(folders["directory"]).all_steps() == [7]


def test_the_newest_of_both_is_restored(folders):
    run = Training("os_g", 4)
    with opened(folders, every=3) as checkpointer:
        for step in range(1, 7):
            run.train(step - 1)
            checkpointer.save(step, run.state, metadata={"m": step})
    checkpointer = opened(folders, every=3)
    restored = checkpointer.restore(like=run.state)
    assert (restored.step, restored.source) == (6, str(folders["directory"]))
    assert checkpointer.restore(5, like=run.state).metadata == {"m": 5}
    checkpointer.save(7, run.state)
    restored = checkpointer.restore(like=run.state)
    assert (restored.step, restored.source) == (7, str(folders["local"]))


def test_a_flipped_bit_is_seen_and_an_older_step_restored(folders):
    run = Training("p_g_os", 4)
    with opened(folders, every=2) as checkpointer:
        checkpointer.save(2, run.state)
    saved_locally(folders, run, 3)
    step, draw = folders["local"] / "process-0" / "3", random.Random(0)
    shards = sorted(read_index(step).shards.values(), key=lambda x: x.offset)
    for x in draw.sample(shards, 12):
        with flipped(step / SHARDS, x.offset + draw.randrange(x.view().nbytes)):
            with pytest.warns(gshard.GShardWarning, match="(?s)step 3 in .*local is incomplete"):
                assert opened(folders).restore(like=run.state).step == 2
            with pytest.raises(gshard.DamagedCheckpointError, match="are on no machine"):
                opened(folders).restore(3, like=run.state)
    for i in range(6):
        checkpointer = opened(folders)
        with flipped(step / INDEX, 1 + 40 * i):
            with pytest.warns(gshard.GShardWarning, match="step 3 in .* no part of it can be read"):
                assert opened(folders).latest_step() == 2
            with pytest.warns(gshard.GShardWarning, match="(?s)step 3 in .*local is incomplete"):
                assert checkpointer.restore(like=run.state).step == 2
    assert opened(folders).restore(like=run.state).step == 3


@contextlib.contextmanager
def flipped(file, at):
    """A file with one bit that is another."""
    before = file.read_bytes()
    file.write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
    yield
    file.write_bytes(before)


def test_parts_of_two_saves_are_never_mixed(folders, tmp_path):
    """As if a machine came back with what it had before the others wrote the step again."""
    run, other = Training("os", 2), folders | {"local": tmp_path / "other"}
    saved_locally(folders, run, 1)
    with pytest.warns(gshard.GShardWarning, match="is only in"), opened(other) as checkpointer:
        run.train(1)
        checkpointer.save(1, run.state)
    part = Path("process-0", "1")
    for first, second in ((folders, other), (other, folders)):
        together = tmp_path / f"together {first['local'].name}"
        shutil.copytree(first["local"], together)
        shutil.copytree(second["local"] / part, together / "process-1" / "1")
        checkpointer = opened(folders | {"local": together})
        found = checkpointer.restore(like=run.plan).state
        assert_equal_bits(values(run.plan.unwrap(found)), run.whole())  # the later one
        checkpointer.save(2, run.state)
        checkpointer.wait()
        assert not (together / "process-1").exists()  # that process is no more
        assert checkpointer.restore(like=run.state).step == 2


def test_what_gshard_did_not_write_stays(folders, tmp_path):
    run, folder = Training("os", 2), tmp_path / "mine"
    (folder / "2024").mkdir(parents=True)
    (folder / "2024" / "thesis.txt").write_text("years")
    with pytest.raises(gshard.GShardError, match="mine' has other files: 2024. Choose"):
        opened(folders | {"local": folder})
    for inside in (folders["directory"], folders["directory"] / "x", tmp_path):
        with pytest.raises(gshard.GShardError, match="are inside each other"):
            opened(folders | {"local": inside})
    folders["local"].mkdir()
    (folders["local"] / ".machine.0123abcd").touch()  # another process is making the mark
    saved_locally(folders, run, 1)
    (folders["local"] / "7").mkdir()
    with opened(folders, keep_last=1) as checkpointer:
        checkpointer.save(2, run.state, force=True)
    assert (folders["local"] / "7").exists()


def test_steps_that_training_did_not_go_on_from_are_not_restored(folders):
    run = Training("os", 2)
    checkpointer = opened(folders, every=20, local_every=2)
    checkpointer.save(20, run.state, metadata={"is": "old"})
    checkpointer.save(24, run.state, metadata={"is": "old"})
    assert checkpointer.restore(20, like=run.state).step == 20
    checkpointer.save(22, run.state, metadata={"is": "new"}, force=True)
    for other in (checkpointer, opened(folders, every=20, local_every=2)):
        restored = other.restore(like=run.state)
        assert (restored.step, restored.metadata) == (22, {"is": "new"})
    assert checkpointer.metadata() == {"is": "new"} and checkpointer.verify() == []


def test_training_goes_on_after_a_step_that_is_restored_instead_of_a_damaged_one(folders):
    run, how = Training("os", 2), {"every": 20, "local_every": 2}
    with opened(folders, **how) as checkpointer:
        for step in (20, 40):
            checkpointer.save(step, run.state)
    shutil.rmtree(folders["local"])  # as after a reboot
    (folders["directory"] / "40" / "gshard.json").write_text("{}")
    with opened(folders, **how) as checkpointer:
        with pytest.warns(gshard.GShardWarning, match="Step 20 is restored instead"):
            restored = checkpointer.restore(like=run.state)
        for step in (22, 24):
            checkpointer.save(step, restored.state)
        checkpointer.wait()
        assert {x.name for x in (folders["local"] / "process-0").glob("[0-9]*")} == {"24"}
        with pytest.warns(gshard.GShardWarning, match="the damaged step 40 is now"):
            checkpointer.save(40, restored.state)
    assert checkpointer.all_steps() == [20, 40]


def test_only_steps_of_the_directory_need_the_metric_of_the_best(folders):
    run = Training("os", 2)
    how = {"every": 10, "local_every": 1, "keep_best": 1, "metric": "accuracy", "mode": "max"}
    with opened(folders, **how) as checkpointer:
        checkpointer.save(1, run.state)
        with pytest.raises(gshard.GShardError, match="needs the number 'accuracy'"):
            checkpointer.save(10, run.state)
        checkpointer.save(10, run.state, metadata={"accuracy": 0.5})


def rewound(folders):
    """A run with step 20 in the directory and step 24 on the machine, and its `Checkpointer`."""
    run, checkpointer = Training("os", 2), opened(folders, every=20, local_every=2)
    for step in (20, 24):
        checkpointer.save(step, run.state)
        checkpointer.wait()
    return run, checkpointer


def test_steps_after_one_that_is_saved_without_a_restore_are_not_restored(folders):
    run, checkpointer = rewound(folders)
    checkpointer.save(22, run.state, force=True)
    checkpointer.wait()
    assert opened(folders, every=20, local_every=2).latest_step() == 22


def test_a_step_that_is_still_written_is_given_up_too(folders, monkeypatch):
    run, write = Training("os", 2), local_store.write_shards

    def late(*given):
        time.sleep(0.5)
        write(*given)

    monkeypatch.setattr(local_store, "write_shards", late)
    with opened(folders) as checkpointer:
        checkpointer.save(3, run.state)
        checkpointer.save(1, run.state, force=True)
    assert opened(folders).latest_step() == 1


def test_steps_after_a_restored_one_are_deleted_before_the_next_save(folders):
    run, checkpointer = rewound(folders)
    checkpointer.restore(20, like=run.state)
    assert opened(folders, every=20, local_every=2).latest_step() == 20


@pytest.mark.parametrize("is_alive", [True, False])
def test_who_only_reads_deletes_nothing(folders, is_alive):
    run, checkpointer = rewound(folders)
    if not is_alive:
        checkpointer._elsewhere = None  # which is a warning
        checkpointer.close()
    reader = opened(folders, every=20, local_every=2, writes=False)
    assert reader.restore(20, like=run.state).step == 20
    assert reader.restore(like=run.state).step == 20  # which it has chosen
    reader.wait()
    with open(next(folders["local"].rglob("24/*.bin"), folders["local"] / "none"), "ab") as file:
        file.truncate(0)
    other = opened(folders, every=20, local_every=2, writes=False)
    with contextlib.suppress(gshard.GShardError):
        other.restore(like=run.state)
        other.wait()
    assert (folders["local"] / "process-0" / "24").exists()


def skip(run):
    """Runs a step that changes nothing, since the batch is not finite."""
    batch = jax.tree.map(
        lambda x: x * np.nan if x.dtype == np.float32 else x, run.model.batch(0, ROWS, 0)
    )
    run.state, metrics = run._step(run.state, batch)
    assert metrics["skipped_steps"] == 1


def test_a_step_that_was_skipped_leaves_the_local_one_alone(folders, monkeypatch):
    run, checkpointer = rewound(folders)
    skip(run)
    monkeypatch.setattr(local_store, "write_shards", lambda *given: 1 / 0)  # as a kill
    checkpointer.save(24, run.state)
    checkpointer.wait()
    assert opened(folders, every=20, local_every=2).restore(like=run.state).step == 24


def test_a_restored_step_may_be_saved_again(folders, monkeypatch, recwarn):
    """By a job that saves before its first step, or whose first step is skipped."""
    run, checkpointer = rewound(folders)
    checkpointer.close()
    with opened(folders, every=20, local_every=2) as checkpointer:
        run.state = checkpointer.restore(like=run.state).state
        run.state = run.state.replace(params=jax.tree.map(lambda x: x * 2, run.state.params))
        checkpointer.save(24, run.state)
        other = run.whole()
    with opened(folders, every=20, local_every=2) as checkpointer:
        run.state = checkpointer.restore(like=run.state).state
        assert_equal_bits(run.whole(), other)
        skip(run)
        monkeypatch.setattr(local_store, "write_shards", lambda *given: 1 / 0)  # it stays as it is
        checkpointer.save(24, run.state)
        checkpointer.wait()
        assert checkpointer.restore(like=run.state).step == 24


def test_another_state_of_the_same_number_is_written(folders):
    run, checkpointer = rewound(folders)
    other = jax.tree.map(lambda x: x * 2, run.state.params)
    checkpointer.save(24, run.state.replace(params=other))
    checkpointer.wait()
    found = opened(folders, every=20, local_every=2).restore(like=run.state)
    assert found.step == 24
    jax.tree.map(np.testing.assert_array_equal, found.state.params, other)


def test_a_skipped_step_after_a_save_of_the_directory_is_no_local_one(folders, recwarn):
    run, checkpointer = rewound(folders)
    checkpointer.save(24, run.state, force=True)
    skip(run)
    checkpointer.save(24, run.state)
    checkpointer.close()
    assert checkpointer.all_steps() == [20, 24]
    assert not (folders["local"] / "process-0" / "24").exists()
    assert not [x for x in recwarn if "only in" in str(x.message)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_local_step_goes_with_the_step_of_the_directory_that_it_follows(folders, asynchronous):
    run = Training("os", 2)
    with opened(folders, every=20, local_every=2, asynchronous=asynchronous) as checkpointer:
        for step in (20, 22):
            checkpointer.save(step, run.state)
            checkpointer.wait()
        checkpointer._elsewhere = None
        checkpointer.delete(20)
        assert checkpointer.latest_step() is None


def test_a_local_step_stays_until_the_directory_has_it(folders, monkeypatch):
    run, checkpointer = rewound(folders)
    there = folders["local"] / "process-0" / "24"
    with monkeypatch.context() as patched:
        patched.setattr(DiskDraft, "combine", lambda *given: 1 / 0)
        checkpointer.save(24, run.state, force=True)
        with pytest.raises(gshard.SaveFailedError, match="step 24 was not saved"):
            checkpointer.wait()
    assert opened(folders, every=20, local_every=2).latest_step() == 24 and there.exists()
    checkpointer.save(24, run.state, force=True)
    checkpointer.wait()
    assert checkpointer.all_steps() == [20, 24] and not there.exists()


def test_a_failed_save_of_the_directory_does_not_keep_the_local_folder_locked(folders, monkeypatch):
    run, checkpointer = rewound(folders)
    with monkeypatch.context() as patched:
        patched.setattr(DiskDraft, "combine", lambda *given: 1 / 0)
        checkpointer.save(26, run.state, force=True)
        with pytest.raises(gshard.SaveFailedError, match="step 26 was not saved"):
            checkpointer.close()
    again = opened(folders, every=20, local_every=2)
    again.save(26, run.state)
    again.wait()
    assert again.latest_step() == 26


@pytest.mark.parametrize("last", [1, 3, 20])
def test_a_failed_local_step_is_not_taken_for_the_last_one(folders, monkeypatch, last):
    """The directory has the last one: an earlier step, the same one or a later one."""
    run = Training("os", 2)
    monkeypatch.setattr(local_store, "write_shards", lambda *given: 1 / 0)
    with pytest.warns(gshard.GShardWarning, match="step 3 was not saved in .*local") as said:
        with opened(folders, every=20) as checkpointer:
            checkpointer.save(3, run.state)
            checkpointer.save(last, run.state, force=True)
    assert checkpointer.all_steps() == [last]
    assert not [x for x in said if "the last step" in str(x.message)]


@pytest.mark.parametrize("first", ["directory", "local", "neither"])
def test_a_deleted_directory_is_not_resumed(folders, monkeypatch, first):
    """Whichever of its last step and the local one that follows is complete first."""
    run, go_on, combine = Training("os", 2), threading.Event(), DiskDraft.combine
    monkeypatch.setattr(DiskDraft, "combine", lambda *given: go_on.wait(60) and combine(*given))
    checkpointer = opened(folders, every=20, local_every=2)
    checkpointer.save(20, run.state)
    if first == "directory":
        go_on.set()
        checkpointer.wait()
    checkpointer.save(24, run.state)
    if first == "local":
        checkpointer._local.wait()
    go_on.set()
    checkpointer.wait()
    assert opened(folders, every=20, local_every=2).restore(like=run.state).step == 24
    shutil.rmtree(folders["directory"])
    with pytest.warns(
        gshard.GShardWarning, match="step 24 .* was saved after step 20 of .*run, wh"
    ):
        again = opened(folders, every=20, local_every=2)
    assert again.latest_step() is None
    with pytest.raises(gshard.GShardError, match="does not exist"):
        again.restore(like=run.state)


def test_a_deleted_step_takes_those_that_follow_it_along(folders):
    run = Training("os", 2)
    checkpointer = opened(folders, every=20, local_every=2)
    for step in (20, 40, 44):
        checkpointer.save(step, run.state)
        checkpointer.wait()
    checkpointer.delete(40)
    assert checkpointer.latest_step() == 20
    assert checkpointer.restore(like=run.state).step == 20
    checkpointer.save(22, run.state)
    assert checkpointer.restore(like=run.state).step == 22


def test_who_forgets_to_restore_loses_nothing(folders):
    run = Training("os", 2)
    saved_locally(folders, run, 3)
    checkpointer = opened(folders)
    with pytest.raises(gshard.GShardError, match="step 2 is not after the newest one, 3, in .*loc"):
        checkpointer.save(2, run.state)
    other = shard(
        TrainState.create(apply_fn=None, params={"x": jnp.ones(8)}, tx=optax.sgd(1.0)), "os", 2
    )
    with pytest.raises(gshard.GShardError, match="checkpoints of another model"):
        checkpointer.save(4, other[0])
    assert opened(folders).restore(like=run.state).step == 3


def test_replicated_arrays_need_room_once(folders, monkeypatch):
    run, asked = Training("dp", 8), []
    monkeypatch.setattr(local_store.LocalStore, "check_room", lambda self, size: asked.append(size))
    saved_locally(folders, run, 1)
    size = sum(x.nbytes for x in run.whole().values())
    assert size <= asked[0] < 1.1 * size


def test_a_failed_save_of_the_directory_is_told_at_the_next_local_one(folders, monkeypatch):
    run = Training("os", 2)
    checkpointer = opened(folders, every=20, on_failure="warn")
    checkpointer.save(1, run.state)
    monkeypatch.setattr(DiskDraft, "combine", lambda *given: 1 / 0)
    checkpointer.save(20, run.state)
    saving = checkpointer._writer.saving
    assert saving is not None
    saving.join()
    with pytest.warns(gshard.GShardWarning, match="step 20 was not saved in .*division by zero"):
        checkpointer.save(21, run.state)


def test_numbers_that_are_not_to_be_saved_are_checked_too(folders):
    run = Training("os", 2)
    checkpointer = gshard.Checkpointer(folders["directory"], every=100)
    for step in (-3, 2.0, np.array([1, 2]), "5"):
        with pytest.raises(gshard.GShardError, match="step=.* must be a whole number"):
            checkpointer.save(step, run.state)
    checkpointer.save(90, run.state)
    with pytest.warns(gshard.GShardWarning, match=r"for step \d+, but not for step 100,"):
        checkpointer.save(120, run.state)
    with pytest.warns(gshard.GShardWarning, match="last step, 120, was not saved"):
        checkpointer.close()
    with pytest.raises(gshard.CallOrderError, match="is closed"):
        checkpointer.save(121, run.state)


def test_a_full_local_folder_is_a_warning(folders, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder)
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        run = Training("os", 2)
        with opened(folders | {"local": folder}, every=2) as checkpointer:
            with pytest.warns(gshard.GShardWarning, match="step 1 was not saved in .*small"):
                checkpointer.save(1, run.state)
                checkpointer.wait()
            run.train(0)
            checkpointer.save(2, run.state)
        assert checkpointer.all_steps() == [2]
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("replaced", [False, True])
def test_training_goes_on_without_its_local_folder(folders, tmp_path, replaced):
    run, scratch = Training("os", 2), tmp_path / "scratch"
    with opened(folders | {"local": scratch / "local"}) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(2, run.state)
        checkpointer._local.saving.join()
        shutil.rmtree(scratch)
        assert not checkpointer._local.store.parts(2)  # as another machine may ask
        if replaced:
            scratch.write_text("no folder")
            with pytest.warns(gshard.GShardWarning, match="step 3 was not saved .*Not a dir"):
                checkpointer.save(3, run.state)
        else:
            checkpointer.save(3, run.state)
            checkpointer.wait()
        checkpointer.save(1, run.state, force=True)  # deletes the local steps after it
        assert checkpointer.restore(like=run.state).step == 1


def test_a_local_step_that_cannot_be_deleted_does_not_end_training(folders, monkeypatch):
    run = Training("os", 2)
    with opened(folders) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(2, run.state)
        with monkeypatch.context() as patch:
            patch.setattr(local_store.Disk, "delete", lambda *_: os.stat("/nowhere"))
            checkpointer.wait()
            with pytest.warns(gshard.GShardWarning, match="step 3 was not saved .*No such file"):
                checkpointer.save(3, run.state)
        checkpointer.save(100, run.state)


def test_the_folder_of_another_run_is_refused(folders, tmp_path):
    run = Training("os", 2)
    saved_locally(folders, run, 1)
    with pytest.raises(gshard.GShardError, match="of another run, whose directory is .*run"):
        opened(folders | {"directory": tmp_path / "other"})
    (folders["local"] / "process-0" / "1").rename(tmp_path / "moved")
    opened(folders | {"directory": tmp_path / "other"})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"every": None}, "local= needs every= and local_every="),
        ({"local_every": None}, "local= needs every= and local_every="),
        ({"local": None}, "local_every=1 needs local=, a folder"),
        ({"every": 0}, "every=0 must be a whole number of steps, 1 or more"),
        ({"local_every": 2.5}, "local_every=2.5 must be a whole number"),
        ({"every": 5, "local_every": 5}, "local_every=5 must be less than every=5"),
        ({"local": "gs://bucket/run"}, "local='gs://bucket/run' is an address"),
        ({"local": 3}, "local=3 must be the path"),
    ],
)
def test_wrong_arguments(folders, how, said):
    with pytest.raises(gshard.GShardError, match=said):
        opened(folders, **how)


# ---- several processes -----------------------------------------------------------------------


def test_processes_of_several_machines(tmp_path):
    """In one test: the processes start once. Each has a folder as if it were a machine."""
    first, second = run_workers(tmp_path, "checkpoint.local.local_worker", str(tmp_path))
    for found in (first, second):
        # A replica is on the other machine.
        assert found["replica"].tolist() == [2, 1]
        # Shards that no other machine has: back to the directory.
        assert found["sharded"].tolist() == [1, 0]
        assert "no machine has all of params/" in found["sharded said"].tolist()[0]
        assert "(process 0), Checkpointer(every=" in found["rhythm"].tolist()[0]
        # Each process of one machine: together they hold an array once, and read it all.
        assert found["together"].tolist() == [2, 1]
        assert "several machines see the same folder" in found["shared"].tolist()[0]
        parts, kept, different = found["kept"].tolist()
        assert parts == 2 and kept == different
    # One process restores what two wrote, also when it may write.
    one, plan = {"every": 100, "local_every": 1, "keep_last": 3}, Training("p_g_os", 3).plan
    where = tmp_path / "one"
    with gshard.Checkpointer(where / "run", local=where / "machine", **one) as checkpointer:
        assert checkpointer.latest_step() == 2
        assert checkpointer.restore(like=plan).source == str(where / "machine")


SAVES = """
import sys
import gshard
gshard.virtual_devices(2)
from tests.checkpoint.test_checkpoints import Training
run = Training("p_g_os", 2)
checkpointer = gshard.Checkpointer(sys.argv[1], every=4, local=sys.argv[2], local_every=1)
source = None
if checkpointer.latest_step() is not None:
    restored = checkpointer.restore(like=run.state)
    run.state, source = restored.state, restored.source
print(int(run.state.step), source, flush=True)
while True:
    step = int(run.state.step)
    (loss,) = run.train(step)
    print(step, repr(loss), flush=True)
    checkpointer.save(step + 1, run.state)
"""


@pytest.mark.parametrize("kills", quick([50, 2], [2]))
def test_killed_at_any_moment_it_goes_on_from_a_complete_step(tmp_path, kills):
    """Its losses are those of a run that never stopped, and it loses two steps at most.

    A machine that comes back empty goes on from the last step in the directory.
    """
    draw, losses = random.Random(2), Training("p_g_os", 2).train(*range(30))
    reached, gained, sources = 0, 0, set[str]()
    directory = gshard.Checkpointer(tmp_path / "run")
    for number in range(kills):
        most = 2  # steps that may be lost
        if number % 3 == 2:
            shutil.rmtree(tmp_path / "local")
            reached, most = directory.latest_step() or 0, 0
        before = reached
        with subprocess.Popen(
            [sys.executable, "-c", SAVES, tmp_path / "run", tmp_path / "local"],
            env=clean_environment() | {"PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            timer = threading.Timer(120, process.kill)
            timer.start()
            line = process.stdout.readline()
            assert line, process.stderr.read()
            step, _, source = line.strip().partition(" ")
            assert int(step) >= reached - most
            sources.add(source)
            lines = [process.stdout.readline() for _ in range(3)]
            threading.Timer(draw.uniform(0, 0.5), process.kill).start()
            lines += process.stdout.read().splitlines()
            timer.cancel()
        for line in filter(None, lines):
            step, _, loss = line.partition(" ")
            if int(step) < len(losses) and loss.strip():
                np.testing.assert_allclose(float(loss), losses[int(step)], 2e-6)
            reached = int(step)
        gained += reached - before
    assert gained > 2 * kills
    of_tiers = [tmp_path / tier for tier in ("local", "run")]
    assert sources >= {str(tier) for tier in of_tiers[: kills - 1]}


def test_a_save_on_the_machine_costs_what_its_shards_have(tmp_path):
    """Not a copy for each device that holds an array."""
    run = Training("dp", 8)
    with pytest.warns(gshard.GShardWarning, match="is only in"):
        with opened({"directory": tmp_path / "run", "local": tmp_path / "local"}) as checkpointer:
            checkpointer.save(1, run.state)
    (file,) = Path(tmp_path / "local").glob(f"process-0/1/{SHARDS}")
    size = sum(x.nbytes for x in run.whole().values())
    assert size <= os.path.getsize(file) < 1.5 * size
