"""A machine that is busy, and a process that ended in time, but was looked at late."""

import signal
import subprocess
import time

import pytest

from gshard.distributed.launch import guardian


class Busy:
    """A process, and a program that sees it, stands for a while, and is late when it goes on."""

    def __init__(self, script: str, stands: float):
        self.process = subprocess.Popen(
            ["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE
        )
        self.process.stdout.readline()
        self.stands = stands

    def running(self) -> list[int]:
        return [self.process.pid] if self.process.returncode is None else []

    def look(self) -> None:
        self.process.poll()
        time.sleep(self.stands)
        self.stands = 0.01


@pytest.fixture
def busy():
    started = []

    def start(*arguments):
        started.append(Busy(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdout.close()


def test_who_failed_by_itself_is_seen_to_have(busy, monkeypatch):
    monkeypatch.setattr(guardian, "_SETTLE", 0.1)
    one = busy("echo; sleep 0.05; exit 7", 1.0)
    guardian.settle(one.running, one.look)
    assert one.process.returncode == 7
    assert one.running() == []


def test_who_went_when_asked_is_not_killed(busy):
    one = busy("trap 'sleep 0.05; exit 0' TERM; echo; while true; do sleep 0.01; done", 1.0)
    guardian.end(one.running, 0.1, one.look)
    assert one.process.returncode == 0


def test_who_does_not_go_is_killed(busy):
    one = busy("trap '' TERM; echo; while true; do sleep 0.01; done", 0.01)
    began = time.monotonic()
    guardian.end(one.running, 0.3, one.look)
    assert one.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began >= 0.3
