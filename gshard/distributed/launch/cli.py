"""`gshard launch`: runs a job, again where it may, and says how it ended."""

from __future__ import annotations

import sys
import time
from signal import SIGTERM, Signals

from gshard._util.errors import GShardError
from gshard.distributed.exit import PREEMPTED
from gshard.distributed.launch.exit_status import first_cause
from gshard.distributed.launch.job import Outcome, run
from gshard.distributed.launch.options import Request, parser, request
from gshard.distributed.launch.report import report
from gshard.distributed.launch.signals import heard

_BEFORE_RESTART = 1.0  # seconds


def main(words: list[str], program: str = "gshard launch") -> int:
    """Runs a command line; returns the exit code."""
    if words[:1] in (["-h"], ["--help"]):
        print(parser(program).format_help(), end="")
        return 0
    try:
        with heard() as told:
            return _run(request(program, words), told)
    except GShardError as error:
        _say(f"error: {error}")
        return 2


def _run(asked: Request, told: list[int]) -> int:
    restarts = 0
    while (outcome := run(asked, restarts, told)).failed:
        _say(report(outcome, asked.log_dir))
        if restarts == asked.max_restarts or told:
            break
        restarts += 1
        _say(f"gshard: starting all processes again ({restarts} of {asked.max_restarts})")
        until = time.monotonic() + _BEFORE_RESTART
        while time.monotonic() < until and not told:
            time.sleep(0.05)
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    codes = {end.code for end in outcome.ends}
    if codes == {0}:
        return 0
    if codes and codes <= {0, PREEMPTED}:
        _say("gshard: the job was told to stop, and all processes did so in order")
        return PREEMPTED
    if outcome.told is not None and not outcome.failed:
        _say(f"gshard: the job was ended by {Signals(outcome.told).name}{_killed(outcome)}")
        return 128 + outcome.told
    code = first_cause(outcome.ends).code
    return code if code > 0 else 128 - code


def _killed(outcome: Outcome) -> str:
    late = [end.rank for end in outcome.ends if end.asked]
    if not late:
        return ""
    hint = ". A script stops in order by gshard.until_preempted" if outcome.told == SIGTERM else ""
    return f"; ranks {late} had not stopped and were killed{hint}"


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody reads any more
        pass
