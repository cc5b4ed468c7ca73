"""One process writes into a directory; a second job is refused before it trains."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.checkpoint.disk_lock import LOCK, is_locked_by, lock, unlock
from tests.jobs import ROOT
from tests.processes import clean_environment


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "folder"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("my only copy")
    run = tmp_path / "run"
    run.mkdir()
    if kind == "link":
        (run / LOCK).symlink_to(precious)
    elif kind == "link to nothing":
        (run / LOCK).symlink_to(tmp_path / "nothing")
    elif kind == "hard link":
        os.link(precious, run / LOCK)
    elif kind == "pipe":
        os.mkfifo(run / LOCK)
    else:
        (run / LOCK).mkdir()
    words = "has a second hard link" if kind == "hard link" else "is a link or not a regular file"
    with pytest.raises(gshard.GShardError, match=words):
        lock(run)
    assert precious.read_text() == "my only copy"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_forked_child_does_not_keep_a_lock(tmp_path):
    """The lock belongs to what both processes opened: the child has to close it."""
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from gshard.checkpoint.disk_lock import lock, unlock\n"
        f"number = lock(Path({str(tmp_path)!r}))\n"
        "if not os.fork():\n"
        "    unlock(number)\n"  # as a finalizer of the child does
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    child = int(program.stdout.readline())
    try:
        with pytest.raises(gshard.CallOrderError, match=f"process {program.pid} on"):
            lock(tmp_path)
        program.kill()
        program.wait()
        os.kill(child, 0)  # it lives
        unlock(lock(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        program.stdout.close()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_in_a_forked_child_the_lock_is_not_its_own(tmp_path):
    number = lock(tmp_path)
    pid = os.fork()
    if not pid:
        os._exit(3 if is_locked_by(number, tmp_path) else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert is_locked_by(number, tmp_path)
    unlock(number)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_cannot_use_a_checkpointer(tmp_path):
    """The thread that saves is not in the child, which would wait for it for ever."""
    with gshard.Checkpointer(tmp_path, every=2) as checkpointer:
        calls = [
            lambda: checkpointer.save(1, None),  # of which no step is saved
            lambda: checkpointer.save(2, None),
            checkpointer.wait,
            lambda: checkpointer.delete(1),
            lambda: checkpointer.restore(like=None),
        ]
        if not (pid := os.fork()):
            signal.alarm(20)
            refused = 0
            for call in calls:
                try:
                    call()
                except gshard.CallOrderError as error:
                    refused += "is a fork of the one" in str(error)
            checkpointer.close()  # as at the end of a `with`
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls)


def test_a_second_job_is_refused_before_it_trains(tmp_path):
    with gshard.Checkpointer(tmp_path, keep_last=3) as first:
        with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
            gshard.Checkpointer(tmp_path, keep_last=3)
        with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
            gshard.Checkpointer(tmp_path, writes=True)
        gshard.Checkpointer(tmp_path, keep_last=3, writes=False)
        first.wait()
    with gshard.Checkpointer(tmp_path, writes=True):
        pass


def test_a_directory_that_cannot_be_written_is_reported_before_training(tmp_path):
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    with pytest.warns(gshard.GShardWarning, match="cannot be written: Not a directory") as said:
        gshard.Checkpointer(below, keep_last=3)
    assert str(below) in str(said[0].message)
    assert said[0].filename == __file__
    gshard.Checkpointer(below, keep_last=3, writes=False)  # silent


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(gshard.GShardWarning, match="without locks .No locks available.*second job"):
        checkpointer = gshard.Checkpointer(tmp_path, writes=True)
    checkpointer.close()


def test_a_full_disk_does_not_keep_a_directory_locked(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # nothing can be written
    try:
        number = lock(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    unlock(number)
    unlock(lock(tmp_path))


def test_readers_need_no_lock(tmp_path):
    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    state, _ = gshard.shard_train_state(({"w": jnp.ones(8)}, optax.sgd(0.1)), mesh, "dp")
    with gshard.Checkpointer(tmp_path, writes=True) as writer:
        writer.save(1, state)
        writer.wait()
        with gshard.Checkpointer(tmp_path) as reader:
            assert reader.restore(like=state).step == 1
            assert reader.verify() == []
            assert reader.metadata() == {}
        gshard.Checkpointer(tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_arguments_that_cannot_be(tmp_path):
    with pytest.raises(gshard.GShardError, match="writes"):
        gshard.Checkpointer(tmp_path, writes="yes")
