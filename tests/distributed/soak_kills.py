"""Kills real jobs at random moments: any number; `tests/distributed/test_faults.py` does a few.

    python -m tests.distributed.soak_kills [COUNT] [SEED]

Every kill is one job of two or three processes; somebody gets SIGKILL or SIGSTOP, or raises, at a
random moment from the first import to the steps. The job must end within the heartbeat and five
seconds, name the rank, and leave no process and no port behind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.jobs import ROOT, Job, assert_port_is_free, launch, running

WORKER = ROOT / "tests" / "distributed" / "launch" / "job_worker.py"
HEARTBEAT, SLACK = 4, 5  # seconds; the launcher's promise is their sum
VICTIMS = ("coordinator", "worker", "launcher")


class Kill(NamedTuple):
    """Who gets what, and when: in seconds after the start, or after the first step."""

    victim: str
    number: int
    processes: int
    early: bool
    after: float

    def __str__(self) -> str:
        when = "start" if self.early else "the first step"
        name = signal.Signals(self.number).name
        return f"{name} to the {self.victim} of {self.processes}, {self.after:.2f} s after {when}"


def random_kill(draw: random.Random) -> Kill:
    victim = draw.choice(VICTIMS)
    # A launcher that is stopped is a shell's Ctrl-Z: nothing has died.
    number = signal.SIGKILL if victim == "launcher" else draw.choice((9, signal.SIGSTOP))
    early = draw.random() < 0.4
    return Kill(victim, number, draw.choice((2, 3)), early, draw.uniform(0, 3 if early else 1))


def check(kill: Kill, folder: Path) -> float:
    """Seconds that the job took to end, once everything about its end is as it must be."""
    words = ("--nproc_per_node", kill.processes, "--heartbeat_timeout", HEARTBEAT, WORKER, "steps")
    with running(launch(*words), folder) as job:
        job.wait_until(lambda: len(job.ranks()) == kill.processes, "all have started")
        if not kill.early:
            job.until_training(kill.processes)
        time.sleep(kill.after)
        return _strike(kill, job)


def _strike(kill: Kill, job: Job) -> float:
    environment = next(e for e in job.pids().values() if "GSHARD_COORDINATOR" in e)
    port = int(environment["GSHARD_COORDINATOR"].rpartition(":")[2])
    began = time.monotonic()
    if kill.victim == "launcher":
        job.process.kill()
    else:
        rank = 0 if kill.victim == "coordinator" else kill.processes - 1
        os.kill(job.ranks()[rank], kill.number)
    code = job.code(HEARTBEAT + SLACK)
    took = time.monotonic() - began
    job.assert_nobody_left()
    assert_port_is_free(port)
    if kill.victim == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + signal.SIGKILL, f"{code}\n{job.err}"
        how = "was stopped" if kill.number == signal.SIGSTOP else "was killed by SIGKILL"
        assert f"The job failed: rank {rank} {how}" in job.err, job.err
        assert "stack trace" not in job.err, job.err
        assert job.err.count("The job failed") == 1
    return took


def main(count: int = 50, seed: int = 0) -> None:
    draw, longest = random.Random(seed), 0.0
    for number in range(1, count + 1):
        kill = random_kill(draw)
        with tempfile.TemporaryDirectory() as folder:
            took = check(kill, Path(folder))
        longest = max(longest, took)
        print(f"{number} of {count}: {kill}: ended in {took:.1f} s", flush=True)
    print(f"{count} kills; the longest end took {longest:.1f} s of {HEARTBEAT + SLACK} allowed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
