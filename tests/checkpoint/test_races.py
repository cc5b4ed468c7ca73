"""What may come between the parts of a save: Ctrl-C, other threads, hands that delete."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import threading
import time
from functools import partial

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.checkpoint import background_save
from gshard.checkpoint.background_save import BackgroundSave
from gshard.checkpoint.disk import DiskDraft
from gshard.checkpoint.manifest import process_manifest
from gshard.checkpoint.own_files import list_files
from tests.tiers import quick

# Orbax leaves its other writes behind when one fails, or is interrupted.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def state():
    params = {"w": np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    return gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0)[0]


@pytest.fixture
def checkpointer(tmp_path):
    with gshard.Checkpointer(tmp_path / "steps", keep_last=2) as made:
        yield made


def names(checkpointer):
    return {path.name for path in checkpointer.directory.iterdir()} - {".gshard_lock"}


def assert_undamaged(checkpointer):
    assert all(not checkpointer.verify(step) for step in checkpointer.all_steps())


@pytest.fixture
def interrupt():
    """Ctrl-C comes after so many seconds; 0: it does not come any more."""
    armed = False

    def stop(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def arm(seconds):
        nonlocal armed
        armed = seconds > 0
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, stop)
    yield arm
    arm(0)
    signal.signal(signal.SIGALRM, before)


def settle(checkpointer):
    """Waits; a save that Ctrl-C has met before it began has failed."""
    try:
        checkpointer.wait()
    except gshard.SaveFailedError as error:
        assert "interrupted" in str(error)


def test_ctrl_c_in_a_wait_forgets_no_save(state, checkpointer, interrupt):
    draw = random.Random(2)
    for step in range(1, 17, 2):
        checkpointer.save(step, state)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    interrupt(draw.uniform(0.001, 0.05))  # before its part is over, and after
                    checkpointer.wait()
                finally:
                    interrupt(0)
        checkpointer.save(step + 1, state)  # waits for the one that was interrupted
        checkpointer.wait()
        assert checkpointer.all_steps() == [step, step + 1]
        assert_undamaged(checkpointer)


@pytest.mark.parametrize("times", quick([25, 400], [25]))
def test_ctrl_c_at_any_moment_of_a_save(times, state, checkpointer, interrupt):
    """The step is there or not, never a part of it; and the same step may be saved again."""
    draw, caught = random.Random(1), 0
    for step in range(1, times + 1):
        try:
            try:
                interrupt(draw.uniform(0.0001, 0.1))
                checkpointer.save(step, state)
                checkpointer.wait()
            finally:
                interrupt(0)
        except KeyboardInterrupt:
            caught += 1
        except gshard.SaveFailedError as error:
            assert "interrupted" in str(error)
        if step % 3 == 0:
            settle(checkpointer)
            if checkpointer.latest_step() != step:
                checkpointer.save(step, state)
                checkpointer.wait()
            assert checkpointer.latest_step() == step
            assert_undamaged(checkpointer)
    assert caught > times // 4
    settle(checkpointer)  # the last one may have been interrupted
    # What an interrupted save still writes ends after it, and goes with a later one.
    for step in range(times + 1, times + 50):
        checkpointer.save(step, state)
        checkpointer.wait()
        if names(checkpointer) == {str(step - 1), str(step)}:
            break
    else:
        pytest.fail(f"debris: {names(checkpointer)}")


def test_ctrl_c_is_not_lost_in_a_clean_up_that_it_breaks(state, checkpointer, monkeypatch):
    """`shutil.rmtree` closed a folder, was interrupted, and failed to close it again."""

    def interrupted(folder, *, ignore_errors=False):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.close(number)
            raise KeyboardInterrupt
        finally:
            os.close(number)

    (checkpointer.directory / "1.0a1b2c3d-0.saving").mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        checkpointer.save(1, state)
    checkpointer.save(1, state)
    checkpointer.wait()
    assert_undamaged(checkpointer)


def test_threads_wait_for_each_other(state, checkpointer):
    """Which step comes first is up to them; a later number is refused, and none is harmed."""
    said = []

    def save(own):
        for i in range(6):
            try:
                checkpointer.save(10 * i + own, state)
            except gshard.GShardError as error:
                said.append(str(error))

    threads = [threading.Thread(target=save, args=(own,)) for own in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpointer.wait()
    assert all("is not after the newest one" in text for text in said), said
    assert len(checkpointer.all_steps()) == 2
    assert names(checkpointer) == {str(step) for step in checkpointer.all_steps()}
    assert_undamaged(checkpointer)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.04])
def test_a_directory_that_is_deleted_while_it_is_written(after, state, checkpointer):
    checkpointer.save(1, state)
    time.sleep(after)
    shutil.rmtree(checkpointer.directory, ignore_errors=True)
    try:
        checkpointer.wait()
    except gshard.SaveFailedError as error:
        assert error.step == 1
    else:  # it was complete before
        assert after > 0
    shutil.rmtree(checkpointer.directory, ignore_errors=True)
    assert checkpointer.all_steps() == []
    checkpointer.save(2, state)  # it is made again
    checkpointer.wait()
    assert checkpointer.all_steps() == [2]
    assert_undamaged(checkpointer)


def test_nobody_waits_for_shards_in_a_folder_that_is_gone(tmp_path):
    """The second of two processes never writes its part."""
    folder = tmp_path / "1.saving"
    for name in ("arrays", "manifests"):
        (folder / name).mkdir(parents=True)
    write = partial(list_files, folder, ())
    saving = BackgroundSave(DiskDraft(folder, 1), 0, 2, write, lambda: None)
    saving.start()
    saving.wait_for_files()
    shutil.rmtree(folder)
    folder.mkdir()  # as one does that still writes there
    said = []

    def wait():
        with pytest.raises(FileNotFoundError) as error:
            saving.wait_for_commit()
        said.append(error.value.filename)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(10)
    saving.give_up()
    # It may look while `rmtree` deletes: its own manifest is gone, the folder around it not yet.
    assert said in ([str(folder / "manifests")], [str(folder / "manifests" / "process_0.json")])


@pytest.mark.parametrize("at_work", [True, False])
def test_at_the_end_of_the_script_files_are_awaited_while_others_work(
    tmp_path, monkeypatch, at_work
):
    """From others that have ended, or of which nothing is known, only for a limited time."""

    class Watchdog:
        def are_at_work(self, ranks):
            return at_work and {*ranks} == {1}

    monkeypatch.setattr(background_save, "watchdogs", [Watchdog()])
    monkeypatch.setattr(background_save, "_EXIT_TIMEOUT", 0.1)
    monkeypatch.setattr(background_save, "_program_over", threading.Event())
    background_save._program_over.set()
    own, other = (tmp_path / process_manifest(rank) for rank in range(2))
    own.parent.mkdir()
    own.touch()
    if at_work:
        threading.Timer(0.5, other.touch).start()
    saving = BackgroundSave(DiskDraft(tmp_path, 1), 0, 2, lambda: None, lambda: None)
    if at_work:
        assert saving._all_files_written()
    else:
        with pytest.raises(TimeoutError, match=r"process_1.json was not written by its process"):
            saving._all_files_written()


def test_nobody_waits_at_the_exit_for_the_commit_of_a_save_that_was_given_up(tmp_path):
    """As another process than the first, whose files are written; in a store they stay for now."""
    saving = BackgroundSave(DiskDraft(tmp_path, 1), 1, 2, lambda: None, lambda: None)
    saving.start()
    saving.wait_for_commit()
    assert background_save._uncommitted is saving.draft
    saving.give_up()
    assert background_save._uncommitted is None


def test_who_forgets_to_close_does_not_lock_himself_out(state, tmp_path):
    for step in (1, 2, 3):
        checkpointer = gshard.Checkpointer(tmp_path)
        checkpointer.save(step, state)
        checkpointer.wait()
        with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
            gshard.Checkpointer(tmp_path).save(9, state)
        del checkpointer
        gc.collect()
    assert gshard.Checkpointer(tmp_path).all_steps() == [1, 2, 3]


def test_a_forgotten_save_is_finished_before_another_may_write(state, tmp_path):
    gshard.Checkpointer(tmp_path).save(1, state)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        gc.collect()
        try:
            with gshard.Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(2, state)
            break
        except gshard.CallOrderError:
            time.sleep(0.01)
    assert checkpointer.all_steps() == [1, 2]
    assert_undamaged(checkpointer)


def test_a_damaged_old_step_does_not_keep_others_from_going(state, checkpointer):
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state)
        checkpointer.wait()
        if step == 2:
            (checkpointer.directory / "1" / "gshard.json").write_text("{")
    assert checkpointer.all_steps() == [1, 3, 4]
