"""A process that fails finishes its save first, within the launcher's `--grace`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gshard._util import events
from gshard.distributed import env_vars, unfinished
from gshard.distributed import exit as leaving
from gshard.distributed.launch.event_log import EventLog, Status
from gshard.distributed.launch.exit_status import End, report
from gshard.distributed.unfinished import Work
from tests.jobs import ROOT, launch, running

SLOW_SAVE = ROOT / "tests" / "distributed" / "slow_save.py"


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A process of the launcher that exits at once when its threads are late."""
    monkeypatch.setattr(leaving, "_code", 0)
    monkeypatch.setattr(unfinished, "_exiting", False)
    monkeypatch.setattr(unfinished, "_IDLE", 0.1)
    monkeypatch.setattr(leaving, "_THREADS_TIMEOUT", 0.0)
    monkeypatch.setattr(events, "_path", str(tmp_path / "status"))
    exited = threading.Event()
    monkeypatch.setattr(leaving, "_exit_now", exited.set)
    return exited


@pytest.fixture
def work(process, tmp_path):
    """Reads the work of the process as its launcher does."""
    log = EventLog(tmp_path, 0, 2**20)
    status = Status(tmp_path / "status", 0, log)

    def read():
        status.update()
        return status.work

    yield read
    status.close()
    log.close()


def test_a_process_that_fails_waits_for_its_save(process, work):
    assert work() == Work()
    with unfinished.finished_first("an earlier save"):
        pass
    with unfinished.finished_first("the save of step 3"):
        leaving.at_exit_with(1)
        assert not process.wait(0.4)
        assert work().running == ("the save of step 3",)
    assert process.wait(10)
    assert work() == Work((), ("the save of step 3",))


def test_the_launchers_grace_limits_the_wait(process, monkeypatch):
    monkeypatch.setenv(env_vars.GRACE, "1")
    with unfinished.finished_first("a save that hangs"):
        began = time.monotonic()
        leaving.at_exit_with(1)
        assert process.wait(10)
        assert time.monotonic() - began > 0.8


def test_a_thread_that_had_no_turn_still_waits_for_a_save(monkeypatch):
    """By a clock of which a second passes from one look to the next."""
    seconds = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None)
    monkeypatch.setattr(unfinished, "time", clock)
    monkeypatch.setattr(unfinished, "_IDLE", 0.1)
    unfinished._running[object()] = "a save"
    try:
        unfinished.wait(0.0, 50.0)
    finally:
        unfinished._running.clear()
    assert next(seconds) >= 50


def test_the_report_says_what_became_of_the_save():
    work = Work(("the save of step 9",), ("the save of step 8",))
    said = report([End(0, 1, work=work), End(1, 0)], 0, "log")
    assert "Rank 0 finished the save of step 8 before it ended." in said
    assert "Rank 0 ended before the save of step 9 was finished: --grace is the limit" in said


def test_a_save_that_a_signal_cut_off_was_not_limited_by_the_grace():
    work = Work(("the save of step 9",))
    killed, aborted = End(0, -9, work=work), End(1, -6, work=work, seconds=1.0)
    asked = End(1, -15, work=work, asked=True, seconds=1.0)
    said = report([killed, aborted], 0, "log")
    assert "Rank 0 was killed by SIGKILL in the middle of the save of step 9." in said
    assert "Rank 1 was killed by SIGABRT in the middle of the save of step 9." in said
    # Nobody waits for a save that process 0 cannot complete.
    assert "Rank 1 was killed by SIGTERM in the middle of" in report([killed, asked], 0, "log")
    assert "--grace" not in said + report([killed, asked], 0, "log")
    assert "--grace is the limit" in report([End(0, 0), asked, End(2, 1)], 0, "log")


@pytest.mark.slow  # real processes, and a disk that takes longer than other threads may
@pytest.mark.parametrize("failing", [0, 1])
def test_a_job_that_fails_has_its_step(tmp_path, failing):
    command = launch("--nproc_per_node", 2, "--virtual_devices", 1, SLOW_SAVE, "10", failing)
    with running(command, tmp_path) as job:
        assert job.code() == 1
        job.assert_nobody_left()
        assert f"Rank {failing} finished the save of step 1 before it ended." in job.err
    assert [path.name for path in Path(tmp_path, "steps").glob("1*")] == ["1"]


@pytest.mark.slow
def test_a_save_that_takes_longer_than_the_grace_is_cut_off(tmp_path):
    command = launch("--grace", 9, "--virtual_devices", 1, SLOW_SAVE, "60", 0)
    with running(command, tmp_path) as job:
        began = time.monotonic()
        assert job.code() == 1
        assert time.monotonic() - began < 40
        assert "Rank 0 ended before the save of step 1 was finished" in job.err
    assert not Path(tmp_path, "steps", "1").exists()
