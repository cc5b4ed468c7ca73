"""A disk that is full, or fails: said in time, with the step; saving goes on when it is mended."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard._util import durable
from gshard._util.errors import OutsideError
from gshard.checkpoint import background_save
from gshard.checkpoint.disk import Disk
from tests.checkpoint.checkpoint_worker import LOCK, files_end_at, saves_on_a_bad_disk

# Orbax leaves its other writes behind when one fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PAGE = 4096


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no small file system: {error}")
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextmanager
def filled(disk: Path, left: int) -> Iterator[None]:
    """As long as something else takes the room, but for so many pages."""
    other = disk / "other"
    for _ in range(100):
        with other.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - PAGE * left)
        if shutil.disk_usage(disk).free == PAGE * left:
            break
        time.sleep(0.1)  # Orbax's threads may write on for a moment after a save that failed
    assert shutil.disk_usage(disk).free == PAGE * left
    yield
    other.unlink()


def state_of(kilobytes: int) -> Any:
    """A train state and its bytes; the optimizer keeps nothing."""
    params = {"w": np.random.default_rng(0).normal(size=(kilobytes, 256)).astype(np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0
    )
    size = sum(x.nbytes for x in jax.tree.leaves(plan.kind.split(state)))
    return state, size


def assert_there(checkpointer: gshard.Checkpointer, *steps: int) -> None:
    """These steps are there, undamaged."""
    assert checkpointer.all_steps() == list(steps)
    assert all(not checkpointer.verify(step) for step in steps)


def assert_alone(checkpointer: gshard.Checkpointer, state: Any, *steps: int) -> None:
    """After a save: these steps are there, undamaged, and nothing else.

    Orbax's threads may run on after a failed write and make its folder once more, also after the
    save that removed it: then a later one does.
    """
    assert_there(checkpointer, *steps)
    wanted, later = {LOCK, *map(str, steps)}, 1000
    while late := set(os.listdir(checkpointer.directory)) - wanted:
        assert {Path(name).suffix for name in late} == {".saving"} and later < 1040
        time.sleep(0.25)
        checkpointer.save(later, state)
        checkpointer.wait()
        checkpointer.delete(later)
        later += 1
    assert set(os.listdir(checkpointer.directory)) == wanted


def test_a_step_without_room_fails_before_it_is_written(disk):
    state, size = state_of(1024)
    with gshard.Checkpointer(disk / "steps") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        with filled(disk, size // PAGE):
            with pytest.raises(gshard.SaveFailedError, match="step 2 .*bytes free.* 1") as error:
                checkpointer.save(2, state)
            assert error.value.step == 2
            assert f"{size:,}" in str(error.value)
            assert_there(checkpointer, 1)
            checkpointer.wait()  # it has been said
        checkpointer.save(2, state)
        checkpointer.wait()
        assert_alone(checkpointer, state, 1, 2)


def test_a_disk_that_is_full_at_any_point_of_a_write(disk):
    """The room for the arrays is there, but page after page of what a step needs next to them."""
    state, size = state_of(64)
    rooms, failed, pages = [], [], range(0, 60)
    with gshard.Checkpointer(disk / "steps", keep_last=1) as checkpointer:
        checkpointer.save(0, state)
        for page in pages:
            step = page + 1
            checkpointer.wait()
            with filled(disk, size // PAGE + 1 + page):
                checkpointer.save(step, state)  # returns: the disk is not full yet
                try:
                    checkpointer.wait()
                    rooms.append(page)
                except gshard.SaveFailedError as error:
                    failed.append(page)
                    assert error.step == step and f"step {step} was not saved" in str(error)
                assert_there(checkpointer, step if rooms else 0)
            if rooms:
                break
    assert len(failed) >= 8 and rooms, f"{failed} {rooms}"


def test_what_a_failed_save_leaves_goes_with_a_later_one(tmp_path):
    """Orbax's threads go on for a while and create again what was removed."""
    params = {f"w{i}": np.full((64 + i, 256), i, np.float32) for i in range(30)}
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0
    )
    with gshard.Checkpointer(tmp_path / "steps", asynchronous=False) as checkpointer:
        for size in range(10_000, 160_000, 10_000):
            with files_end_at(size), pytest.raises(gshard.SaveFailedError, match="step 1 was not"):
                checkpointer.save(1, state)
        checkpointer.save(1, state)
        assert_alone(checkpointer, state, 1)
        restored = checkpointer.restore(like=(state, plan)).state
        assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state)))


@contextmanager
def written_into(draft: Path) -> Iterator[None]:
    """As long as somebody goes on to write a save into this folder."""
    folder, stop = draft / "arrays" / "d", threading.Event()

    def write():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "late").write_bytes(b"late")

    late = threading.Thread(target=write)
    late.start()
    try:
        yield
    finally:
        stop.set()
        late.join()


def draft_of(checkpointer: gshard.Checkpointer, step: int) -> Path:
    """Where the next save writes."""
    return checkpointer._writer._draft(step).folder


def test_what_a_failed_save_still_writes_is_in_no_step(tmp_path):
    state, _ = state_of(512)
    with gshard.Checkpointer(tmp_path / "steps") as checkpointer:
        failed = draft_of(checkpointer, 1)
        with files_end_at(100_000), pytest.raises(gshard.SaveFailedError):
            checkpointer.save(1, state)
            assert failed.exists()
            checkpointer.wait()
        with written_into(failed):
            checkpointer.save(1, state)
            checkpointer.wait()
        assert_there(checkpointer, 1)
    assert not list((tmp_path / "steps" / "1").rglob("late"))


def test_what_an_earlier_job_still_writes_is_in_no_step(tmp_path):
    """Its machine was cut off, has lost the lock, and is back."""
    state, _ = state_of(512)
    with gshard.Checkpointer(tmp_path / "steps") as earlier:
        cut_off = draft_of(earlier, 1)
    with gshard.Checkpointer(tmp_path / "steps") as checkpointer, written_into(cut_off):
        checkpointer.save(1, state)
        checkpointer.wait()
        assert_there(checkpointer, 1)
    assert not list((tmp_path / "steps" / "1").rglob("late"))


def test_a_state_dict_without_room_leaves_the_one_before(tmp_path):
    random = np.random.default_rng(0)
    small, large = ({"w": random.normal(size=size)} for size in (10, 100_000))
    gshard.paddle.save(small, tmp_path)
    with files_end_at(100_000), pytest.raises(gshard.GShardError, match="File too large"):
        gshard.paddle.save(large, tmp_path)
    assert os.listdir(tmp_path) == ["gshard_state"]
    assert (gshard.paddle.load(tmp_path)["w"] == small["w"]).all()


@pytest.mark.parametrize("call", ["save", "wait", "restore", "delete", "close"])
def test_the_next_call_raises(call, tmp_path):
    state, _ = state_of(512)
    checkpointer = gshard.Checkpointer(tmp_path / "steps")
    checkpointer.save(1, state)
    checkpointer.wait()
    calls = {
        "save": lambda: checkpointer.save(3, state),
        "wait": checkpointer.wait,
        "restore": lambda: checkpointer.restore(like=state),
        "delete": lambda: checkpointer.delete(1),
        "close": checkpointer.close,
    }
    with files_end_at(100_000):
        checkpointer.save(2, state)
        with pytest.raises(gshard.SaveFailedError, match="step 2 was not saved") as error:
            calls[call]()
    assert error.value.step == 2
    assert_there(checkpointer, 1)
    if call != "close":
        checkpointer.save(2, state)
        checkpointer.wait()
        assert_alone(checkpointer, state, 1, 2)
        checkpointer.close()


def test_a_save_that_waits_raises_itself(tmp_path):
    state, _ = state_of(512)
    with gshard.Checkpointer(tmp_path / "steps", asynchronous=False) as checkpointer:
        checkpointer.save(1, state)
        with files_end_at(100_000), pytest.raises(gshard.SaveFailedError, match="step 2"):
            checkpointer.save(2, state)
        assert_there(checkpointer, 1)
        checkpointer.save(2, state)
        assert_alone(checkpointer, state, 1, 2)


def test_a_step_whose_name_is_not_synced_is_no_step_and_can_be_saved_again(tmp_path, monkeypatch):
    state, _ = state_of(16)
    run, fsync = tmp_path / "run", durable.fsync
    with gshard.Checkpointer(run, asynchronous=False) as checkpointer:
        checkpointer.save(1, state)

        def fails(path):  # what is in the step is synced, its name is not
            if path == run:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(path)

        with monkeypatch.context() as patched:
            patched.setattr("gshard.checkpoint.disk.fsync", fails)
            with pytest.raises(gshard.SaveFailedError, match="step 2 .* The newest step is 1"):
                checkpointer.save(2, state)
        checkpointer.save(2, state)
        assert checkpointer.all_steps() == [1, 2] and checkpointer.verify() == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_who_wants_to_train_on_is_warned(asynchronous, tmp_path):
    state, _ = state_of(512)
    with gshard.Checkpointer(
        tmp_path / "steps", asynchronous=asynchronous, on_failure="warn"
    ) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        with files_end_at(100_000):
            with pytest.warns(gshard.GShardWarning, match="step 2 was not saved") as said:
                checkpointer.save(2, state)
                checkpointer.wait()
            assert len(said) == 1
            assert_there(checkpointer, 1)
        checkpointer.save(3, state)
        checkpointer.wait()
        assert_alone(checkpointer, state, 1, 3)


def test_the_disk_of_one_of_two_processes(tmp_path, monkeypatch):
    """Both say the same, and go on together."""
    jax.devices()  # this process has its eight before they are forgotten
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    said = gshard.distributed.spawn(
        saves_on_a_bad_disk, (str(tmp_path / "steps"),), nprocs=2, virtual_devices=2
    )
    assert said[0] == said[1]
    assert all("step 2 was not saved" in text and "process 1: " in text for text in said[0][:2])
    checkpointer = gshard.Checkpointer(tmp_path / "steps")
    assert_there(checkpointer, 1, 2, 3)


def test_a_save_whose_thread_cannot_start_has_failed(tmp_path, monkeypatch):
    """And neither the next save nor the end of the program waits for it."""
    state, _ = state_of(16)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "gshard-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            checkpointer.save(1, state)
        # Else the first of several processes would commit it, and this one would not know.
        assert checkpointer._writer.saving.draft.written_manifests() == set()
        with pytest.raises(gshard.SaveFailedError, match="can't start new thread"):
            checkpointer.wait()
        assert not background_save._running
        checkpointer.save(2, state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [2]


@pytest.mark.parametrize("call, code", [("fsync", errno.EINVAL), ("open", errno.EACCES)])
def test_a_folder_that_cannot_be_synced_keeps_nobody_from_saving(tmp_path, monkeypatch, call, code):
    """Some file systems sync no folders, and the folder above may not be readable."""
    state, _ = state_of(16)
    sync, failed = getattr(os, call), []

    def fails(what, *given, **more):
        is_folder = stat.S_ISDIR(os.stat(what).st_mode) if os.path.exists(what) else False
        if is_folder and (call == "fsync" or given == (os.O_RDONLY,)):
            failed.append(what)
            raise OSError(code, os.strerror(code), what)
        return sync(what, *given, **more)

    run = tmp_path / "new" / "run"
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with gshard.Checkpointer(run) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            checkpointer.save(2, state)
    assert failed
    assert_there(checkpointer, 1, 2)


def test_a_file_that_cannot_be_synced_is_not_saved(tmp_path, monkeypatch):
    def fails(number):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fails)
    durable.fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        durable.fsync(tmp_path / "file")


@pytest.mark.parametrize("error, kind", [(OSError(116, "Stale"), OutsideError), (KeyError(), None)])
def test_a_step_that_a_disk_cannot_delete_is_no_mistake_of_the_program(
    tmp_path, monkeypatch, error, kind
):
    state, _ = state_of(16)

    def fails(disk, step):
        raise error

    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
        monkeypatch.setattr(Disk, "delete", fails)
        with pytest.raises(gshard.GShardError, match="step 1 could not be deleted") as raised:
            checkpointer.delete(1)
    assert type(raised.value) is (kind or gshard.GShardError)


def test_a_link_to_a_step_is_said_to_be_none(tmp_path):
    state, _ = state_of(16)
    run = tmp_path / "run"
    with gshard.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state)
    (run / "1").rename(tmp_path / "archived")
    (run / "1").symlink_to(tmp_path / "archived")
    checkpointer = gshard.Checkpointer(run)
    (run / "latest").symlink_to(run / "latest")  # leads to itself
    with pytest.warns(gshard.GShardWarning, match=r"not read as steps \(1\), because") as said:
        assert checkpointer.latest_step() is None and checkpointer.all_steps() == []
    assert len(said) == 1
