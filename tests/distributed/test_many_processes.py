"""Thousands of processes: process 0 is real, and the others are stubs that speak its protocol."""

from __future__ import annotations

import re
import resource

import pytest

from gshard.distributed.rendezvous import ReservedPort
from tests.processes import run_together

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
PROGRAM = ("-m", "tests.distributed.many_processes")


def run(folder, zero: str, others: str, processes: int, soft: int, hard: int) -> tuple[str, str]:
    """What process 0 says, and its stubs."""
    kept = ReservedPort()
    at = [kept.address.host, str(kept.address.port), str(processes)]
    commands = [[*PROGRAM, zero, *at, str(soft), str(hard)], [*PROGRAM, others, *at]]
    try:
        ended = run_together(folder, commands, to_the_end=True)
    finally:
        kept.release()
    assert [x.code for x in ended] == [0, 0], ended
    return ended[0].said, ended[1].said


def seconds_of(said: str) -> float:
    return float(re.findall(r"seconds of CPU: (\S+)", said)[0])


@pytest.mark.slow
def test_a_roll_call_of_thousands_under_a_soft_limit_of_1024_files(tmp_path):
    processes = min(10_000, HARD - 300)
    zero, others = run(tmp_path, "roll", "answer", processes, 1024, HARD)
    assert "all arrived" in zero
    assert others.startswith(f'{processes - 1} were told [\'{{"go": {{"port": 1}}}}')
    assert seconds_of(zero) < 2.0 * processes / 10_000
    assert ("Raise the hard limit" in zero) == (2 * processes + 128 > HARD)


def test_a_hard_limit_that_is_too_low_is_named(tmp_path):
    zero, others = run(tmp_path, "roll", "answer", 300, 256, 256)
    assert "process 0 cannot open a connection to each of 300 processes: Too many open" in zero
    assert "(EMFILE)" in zero
    assert "a limit of 256. Raise the hard limit" in zero
    assert "cannot open a connection" in others  # those that had arrived


@pytest.mark.slow
def test_thousands_say_where_they_are_meet_and_leave(tmp_path):
    processes = min(2_000, HARD - 300)  # one program answers for all of them within 3 s
    zero, others = run(tmp_path, "serve", "join", processes, HARD, HARD)
    asked, met, left = others.splitlines()
    assert asked == f"[('step 1', {processes})] True"
    assert met == "[(True, None)]"
    assert left == "[(True, (5, 'has left'))]"
    assert seconds_of(zero) < 20.0 * processes / 10_000
