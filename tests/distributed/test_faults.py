"""Jobs that lose a process: they end in time and in words, and leave nothing behind."""

from __future__ import annotations

import random
import signal

import pytest

from tests.distributed.soak_kills import HEARTBEAT, SLACK, WORKER, Kill, check, random_kill
from tests.jobs import launch, running
from tests.tiers import quick

DRAW = random.Random(7)
QUICK = [
    Kill("worker", signal.SIGKILL, 3, False, DRAW.uniform(0, 1)),
    Kill("coordinator", signal.SIGKILL, 2, False, DRAW.uniform(0, 1)),
    Kill("worker", signal.SIGSTOP, 2, False, DRAW.uniform(0, 1)),
]
KILLS = QUICK + [random_kill(DRAW) for _ in range(21)]


@pytest.mark.parametrize("kill", quick(KILLS, QUICK), ids=str)
def test_a_job_that_loses_a_process_ends_in_time(kill, tmp_path):
    check(kill, tmp_path)


@pytest.mark.slow
def test_one_that_never_arrives_is_named(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time, gshard\n"
        "if os.environ['GSHARD_PROCESS_ID'] == '1': time.sleep(1000)\n"
        "gshard.distributed.initialize()\n"
    )
    words = ("--nproc_per_node", 3, "--start_timeout", 4, script)
    with running(launch(*words), tmp_path) as job:
        assert job.code(4 + HEARTBEAT + SLACK) == 1
        assert "arrived: 0, 2; missing: 1" in job.err
        job.assert_nobody_left()


@pytest.mark.slow
def test_processes_without_a_launcher_do_not_hang_at_exit(tmp_path):
    """Two processes by hand: one raises; the other says so in a paragraph, and ends."""
    import sys

    from tests.jobs import Job

    variables = {
        "GSHARD_COORDINATOR": "127.0.0.1:29517",
        "GSHARD_NUM_PROCESSES": "2",
        "GSHARD_RESTARTS": "0",
    }
    command = [sys.executable, str(WORKER), "steps", "100000", "1"]
    jobs = [Job(command, tmp_path, **variables, GSHARD_PROCESS_ID=str(rank)) for rank in range(2)]
    try:
        assert [job.code() for job in jobs] == [1, 1]
        assert "ValueError: a rank that failed" in jobs[1].err
        assert "lost its connection to another one" in jobs[0].err
        assert "stack trace" not in jobs[0].err
    finally:
        for job in jobs:
            job.kill_all()
