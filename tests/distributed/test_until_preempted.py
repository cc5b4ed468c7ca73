"""What a script that is told to stop has taken of its data."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import optax
import pytest

import gshard
from gshard.distributed import exit


@pytest.fixture
def alone(monkeypatch):
    """A process that has not listened for signals before, nor does afterwards."""
    monkeypatch.setattr(exit, "_listening", False)
    monkeypatch.setattr(exit, "_signal_received", False)
    monkeypatch.setattr(exit, "_told", False)
    before = {number: signal.getsignal(number) for number in exit.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", exit.STOP_SIGNALS)
def test_the_position_of_a_loader_is_that_of_the_batches_it_gave(alone, number):
    params = {"w": np.ones((8, 8), np.float32)}
    _, plan = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "dp")
    loader = gshard.DataLoader({"x": np.arange(80)}, 8, plan)
    seen, saved = 0, []

    def save() -> None:
        saved.append(loader.state_dict()["position"])

    with pytest.raises(SystemExit) as stopped:
        for _ in gshard.distributed.until_preempted(loader, save):
            seen += 1
            if seen == 3:
                os.kill(os.getpid(), number)
    assert stopped.value.code == gshard.distributed.PREEMPTED_EXIT_CODE
    assert seen == 3
    assert saved == [3]


def test_a_handler_of_the_program_stays(alone):
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    for i in gshard.distributed.until_preempted(range(3)):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(seen) == i + 1


def test_faulthandler_stays(alone, tmp_path):
    """Python does not know of its handler."""
    with (tmp_path / "stacks").open("w+") as file:
        # Of all threads it writes a hundred, and the workers of other tests may be more.
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            for _ in gshard.distributed.until_preempted(range(1)):
                signal.raise_signal(signal.SIGUSR1)  # handled in this thread, at once
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        assert "test_faulthandler_stays" in (tmp_path / "stacks").read_text()


def test_a_pool_of_forked_workers_that_are_busy_ends(alone, monkeypatch):
    """It sends SIGTERM to its workers, and waits for them without a limit."""
    monkeypatch.setattr(exit, "_FORK_GRACE", 5)
    gshard.distributed.preempted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process that has threads
        pool = multiprocessing.get_context("fork").Pool(2)
    assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
    pool.map_async(time.sleep, [100, 100], chunksize=1)
    time.sleep(0.3)
    workers = multiprocessing.active_children()
    ends = threading.Thread(target=pool.terminate, daemon=True)
    ends.start()
    time.sleep(0.3)
    assert all(worker.is_alive() for worker in workers)  # a scheduler sends it to them, too
    ends.join(30)
    left = [worker for worker in workers if worker.is_alive()]
    for worker in left:  # or this program would wait for them, too
        worker.kill()
    assert not left
    assert not gshard.distributed.preempted()


def in_a_fork(act: Callable[[], bool]) -> int:
    """The exit code of a forked child, 0 if it returns True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process that has threads
        child = os.fork()
    if not child:
        try:
            os._exit(not act())
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("asks_before", [True, False])
def test_a_fork_that_asks_itself_is_told_and_not_ended(alone, asks_before):
    gshard.distributed.preempted()

    def act() -> bool:
        if asks_before:
            assert not gshard.distributed.preempted()
        signal.raise_signal(signal.SIGTERM)
        return gshard.distributed.preempted() and signal.alarm(0) == 0

    assert in_a_fork(act) == 0


def test_a_fork_that_does_not_ask_ends_whatever_the_program_does_at_an_alarm(alone, monkeypatch):
    monkeypatch.setattr(exit, "_FORK_GRACE", 1)
    gshard.distributed.preempted()

    def act() -> bool:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
        return True

    assert in_a_fork(act) == -signal.SIGALRM


def test_batches_that_end_by_themselves(alone):
    assert list(gshard.distributed.until_preempted(range(3))) == [0, 1, 2]
