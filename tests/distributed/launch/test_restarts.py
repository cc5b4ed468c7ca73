"""Whether a job that has failed starts again, when, and what is said of it."""

from __future__ import annotations

import json
import re
import signal

import pytest

from gshard.distributed.exit import LOST_PEER
from gshard.distributed.launch.exit_status import End
from gshard.distributed.launch.restarts import Failure, Restarts, error_of
from gshard.distributed.unfinished import Work
from gshard.distributed.watchdog import HANGS
from tests.jobs import ROOT, launch, running

WORKER = ROOT / "tests" / "distributed" / "launch" / "seen_worker.py"
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 3, in f\n    g()\n"


def failure(error: str = "", step: int | None = None, saved: int = -1) -> Failure:
    return Failure(0, error, step, (-1 if step is None else step, saved))


def test_the_pauses_double_up_to_a_minute():
    restarts = Restarts(9)
    decisions = [restarts.after(failure()) for _ in range(10)]
    assert [d.seconds for d in decisions[:-1]] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [d.again for d in decisions] == [True] * 9 + [False]
    assert decisions[1].why == "2 of 9"
    assert decisions[-1].why == "9 restarts in a row made no progress (--max_restarts 9)"


@pytest.mark.parametrize("further", [failure(step=11), failure(step=7, saved=6)])
def test_after_progress_restarts_count_again(further):
    restarts = Restarts(2)
    for _ in range(2):
        assert restarts.after(failure(step=10, saved=5)).again
    decision = restarts.after(further)
    assert decision[:2] == (True, 1)
    assert re.fullmatch(r"1 of 2, since it got further than before \(.*\)", decision.why)
    assert restarts.after(further).seconds == 2
    assert not restarts.after(further).again


def test_progress_is_more_than_ever_before():
    restarts = Restarts(2)
    found = [restarts.after(failure(step=step)).again for step in (20, 5, 10)]
    assert found == [True, True, False]


def test_the_same_error_at_the_same_step_is_not_tried_again():
    restarts = Restarts(9)
    assert restarts.after(failure("ValueError: at 0x7f01 of 3", 12)).again
    decision = restarts.after(failure("ValueError: at 0x7f02 of 3", 12))
    assert not decision.again
    assert "rank 0 failed again after step 12 with the same error" in decision.why
    assert "ValueError: at 0x7f02" in decision.why


@pytest.mark.parametrize(
    "second",
    [
        failure("", 12),
        failure("KeyError: 'x'", 12),
        failure("ValueError: x", 11),
        failure("ValueError: x", 12, saved=4),
    ],
    ids=["a lost node", "another error", "another step", "a new checkpoint"],
)
def test_what_is_tried_again(second):
    restarts = Restarts(9)
    assert restarts.after(failure("ValueError: x", 12)).again
    assert restarts.after(second).again


def test_the_same_error_on_other_machines_is_tried_again_once():
    restarts = Restarts(9)
    assert restarts.after(failure("ValueError: x", 12)).again
    assert restarts.after(failure("ValueError: x", 12), same_machines=False).again
    assert not restarts.after(failure("ValueError: x", 12)).again


GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File 'x.py', line 3, in f
  | ExceptionGroup: 1 failed (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File 'x.py', line 9, in g
    | TimeoutError: no answer
    +------------------------------------
"""

ENDS = {
    "an exception": (1, TRACEBACK + "ValueError: no\nand more", "ValueError: no"),
    "of a module": (1, TRACEBACK + "a.b.MyError: no", "a.b.MyError: no"),
    "the last of several": (
        1,
        f"{TRACEBACK}KeyError: 1\n\nDuring handling ...\n\n{TRACEBACK}TypeError: 2\nbye",
        "TypeError: 2",
    ),
    "an exit code": (3, "no traceback", "exited with code 3"),
    "a crash": (-signal.SIGSEGV, "", "was killed by SIGSEGV"),
    "a killed process": (-signal.SIGKILL, "", ""),
    "a network error": (1, TRACEBACK + "ConnectionResetError: [Errno 104]", ""),
    "a disk error": (1, TRACEBACK + "OSError: [Errno 116] Stale file handle", ""),
    "a save": (1, TRACEBACK + "gshard.checkpoint.save.SaveFailedError: the disk is full", ""),
    "a list of steps": (1, TRACEBACK + "gshard.checkpoint.step_files.StorageError: no answer", ""),
    "a restore": (1, TRACEBACK + "gshard.distributed.agree.FailedOutsideError: Stale file", ""),
    "a bug in a restore": (
        1,
        TRACEBACK + "gshard.distributed.agree.FailedError: process 0: KeyError: 'w'",
        "gshard.distributed.agree.FailedError: process 0: KeyError: 'w'",
    ),
    "another process's storage": (1, TRACEBACK + "gshard._util.errors.OutsideError: process 1", ""),
    "a lock": (1, TRACEBACK + "gshard.checkpoint.step_files.InUseError: process 3 on a", ""),
    "a missing file": (1, TRACEBACK + "FileNotFoundError: x", "FileNotFoundError: x"),
    "others did not come": (1, TRACEBACK + "gshard.distributed.rendezvous.NotArrivedError: 1", ""),
    "a lost peer": (1, TRACEBACK + "ValueError: Gloo AllReduce failed", ""),
    "the last of a group": (1, GROUP, ""),
    "a hang": (1, f"{HANGS}process 0 has waited 600 s", ""),
}


@pytest.mark.parametrize("case", ENDS)
def test_errors_of_the_program_are_told_from_others(case):
    code, text, expected = ENDS[case]
    assert error_of(End(0, code, text=text)) == expected
    assert case != "a lost peer" or LOST_PEER.search(text)


def test_the_failure_is_that_of_the_first_process_to_fail():
    ends = [
        End(0, 1, text="Gloo AllReduce failed", seconds=1, work=Work(step=9, saved=8)),
        End(1, 3, seconds=2, work=Work(step=7)),
    ]
    assert Failure.of(ends) == Failure(1, "exited with code 3", 7, (9, 8))


def test_a_hang_is_a_bug_if_it_is_at_a_step():
    ends = [
        End(rank, 1, text=f"{HANGS}process 0 has waited", work=Work(step=20 + rank))
        for rank in (0, 1)
    ]
    assert Failure.of(ends) == Failure(0, "the job hangs", 21, (21, -1))


@pytest.mark.slow
def test_a_bug_ends_the_job(tmp_path):
    command = launch("--max_restarts", 5, "--virtual_devices", 1, WORKER, 20, "fail", 6)
    with running(command, tmp_path) as job:
        assert job.code() == 1
        assert job.err.count("starting all processes again in 1 s (1 of 5)") == 1
        assert (
            "gshard: not starting again: rank 0 failed again after step 6 with the same error, so "
            "it is a bug or bad data, not a lost machine: RuntimeError: the data of step 6 are bad"
        ) in job.err
    found = (tmp_path / "log" / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in found]
    assert [event["event"] for event in found if event["rank"] is None] == [
        "start", "restart", "start", "give_up", "exit",
    ]  # fmt: skip
    assert [event["step"] for event in found if event["event"] == "restore"] == [4]


@pytest.mark.slow
def test_a_job_that_gets_further_is_started_again_and_again(tmp_path):
    command = launch("--max_restarts", 1, "--nproc_per_node", 2, "--virtual_devices", 1)
    with running([*command, str(WORKER), "20", "kill", "3", "5", "9"], tmp_path) as job:
        assert job.code() == 0, job.err
        assert job.err.count("starting all processes again in 1 s (1 of 1") == 3
        assert "(1 of 1, since it got further than before (step 5 after 3, checkpoint 4" in job.err
