"""A machine that is busy, and a process that ended in time, but was looked at late."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from gshard.distributed.launch import supervisor
from gshard.distributed.launch.job import _stop_in_order
from gshard.distributed.launch.output import Lines
from gshard.distributed.launch.supervisor import Child, Supervisor
from gshard.distributed.unfinished import Work


class Shell(Child):
    """A process that runs a shell script; it has begun when this returns."""

    def __init__(self, script: str, rank: int = 0):
        self.process = subprocess.Popen(
            ["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE
        )
        super().__init__(rank, self.process.pid, {}, Lines())
        self.process.stdout.readline()

    def exit_code(self):
        return self.process.poll()

    def wait(self):
        self.process.wait()

    def close(self):
        self.process.stdout.close()


class Busy(Supervisor):
    """After its first look at the processes this program does not run for a second."""

    pause = 1.0

    def tick(self):
        super().tick()
        time.sleep(self.pause)
        self.pause = 0.0


@pytest.fixture
def busy():
    made = Busy()
    yield made
    made.close()


def test_who_failed_by_itself_is_seen_to_have(busy, monkeypatch):
    monkeypatch.setattr(supervisor, "_SETTLE", 0.1)
    busy.add(Shell("echo; sleep 0.3; exit 7"))
    busy.settle()
    assert busy.ends[0].code == 7
    assert busy.failed
    assert not busy.running


def test_who_went_when_asked_is_not_killed(busy, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAILED_GRACE", 0.1)
    busy.add(Shell("trap 'sleep 0.3; exit 0' TERM; echo; while true; do sleep 0.01; done"))
    busy.end_rest()
    assert busy.ends[0].code == 0


def test_who_does_not_go_is_killed(busy, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAILED_GRACE", 0.3)
    busy.pause = 0.0
    busy.add(Shell("trap '' TERM; echo; while true; do sleep 0.01; done"))
    began = time.monotonic()
    busy.end_rest()
    assert busy.ends[0].code == -signal.SIGKILL
    assert busy.ends[0].asked
    assert time.monotonic() - began >= 0.3


class Unkillable(Shell):
    """A process of which the kernel reports no end for a moment, as in an uninterruptible wait."""

    def exit_code(self):
        return super().exit_code() if time.monotonic() > self.until else None


def test_who_does_not_end_by_sigkill_is_named_once(busy, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "_UNKILLABLE", 0.1)
    busy.pause = 0.0
    child = Unkillable("echo; sleep 100", rank=3)
    child.until = time.monotonic() + 0.6
    busy.add(child)
    busy.kill()
    said = capsys.readouterr().err
    assert said.count("were killed by SIGKILL 0.1 s ago and have not ended") == 1
    assert f"ended: rank 3 (process id {child.pid}). The kernel waits" in said


class Saves(Shell):
    """A process that has a save to finish for half a second."""

    def __init__(self, script):
        super().__init__(script)
        self.until = time.monotonic() + 0.5

    def work(self):
        return Work(("the save of step 1",) if time.monotonic() < self.until else ())


def test_a_save_is_finished_too_if_another_process_fails_after_a_signal(monkeypatch):
    monkeypatch.setattr(supervisor, "_SETTLE", 0.1)
    made = Supervisor()
    try:
        made.add(saves := Saves("trap '' TERM; echo; sleep 10"))
        made.add(Shell("trap 'exit 3' TERM; echo; while true; do sleep 0.01; done", rank=1))
        began = time.monotonic()
        _stop_in_order(made, [signal.SIGTERM], grace=10.0)
        assert made.ends[1].code == 3 and made.ends[0].code == -signal.SIGKILL
        assert saves.until - began < time.monotonic() - began < 5
    finally:
        made.close()


@pytest.mark.parametrize(
    ("grace", "signals", "least", "most"),
    [(10.0, 0, 0.4, 5.0), (0.1, 0, 0.0, 0.4), (10.0, 2, 0.0, 0.4)],
)
def test_who_saves_is_ended_after_the_save(busy, grace, signals, least, most):
    busy.pause = 0.0
    busy.add(Saves("echo; exec sleep 10"))
    began = time.monotonic()
    busy.let_finish(grace, lambda: signals > 1)
    assert least <= time.monotonic() - began < most
