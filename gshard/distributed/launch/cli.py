"""`gshard launch`: runs a job, again where it may, and says how it ended."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from signal import SIGTERM, Signals

from gshard._util.errors import GShardError
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.launch.exit_status import End, first_cause, in_words, meaning
from gshard.distributed.launch.job import Outcome, heard, run
from gshard.distributed.launch.options import Request, parser, request

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
    if codes and codes <= {0, PREEMPTED_EXIT_CODE}:
        _say("gshard: the job was told to stop, and all processes did so in order")
        return PREEMPTED_EXIT_CODE
    if outcome.told is not None and not outcome.failed:
        _say(f"gshard: the job was ended by {Signals(outcome.told).name}{_killed(outcome)}")
        return 128 + outcome.told
    code = first_cause(outcome.ends).code
    return code if code > 0 else 128 - code


def _killed(outcome: Outcome) -> str:
    late = [end.rank for end in outcome.ends if end.asked]
    if not late:
        return ""
    hint = (
        ". A script stops in order by gshard.distributed.until_preempted"
        if outcome.told == SIGTERM
        else ""
    )
    return f"; ranks {late} had not stopped and were killed{hint}"


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody reads any more
        pass


_WIDTH = 96


def report(outcome: Outcome, log_dir: Path) -> str:
    """Which process failed first, how, its last lines, what it means, and what the others did."""
    first = first_cause(outcome.ends)
    how = "was stopped and had to be killed" if first.stopped else in_words(first.code)
    said = f"The job failed: rank {first.rank} {how} after {first.seconds:.1f} s. "
    blocks = [_paragraph(said + meaning(first, outcome.memory_kills))]
    if first.tail:
        blocks.append(f"Last lines of rank {first.rank}:")
        blocks.append(textwrap.indent("\n".join(first.tail), "    | ", lambda _: True))
    others = [_other(end) for end in outcome.ends if end is not first]
    if others:
        blocks.append(_paragraph("The others: " + "; ".join(others) + "."))
    blocks.append(f"Logs: {log_dir}/rank-*.log")
    return "\n".join(f"gshard: {line}" for block in blocks for line in block.splitlines())


def _other(end: End) -> str:
    if end.code == 0:
        return f"rank {end.rank} had finished"
    if end.asked:
        return f"rank {end.rank} was ended"
    why = ", since it had lost a peer" if end.follows else ""
    return f"rank {end.rank} {in_words(end.code)}{why}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text.strip(), _WIDTH)
