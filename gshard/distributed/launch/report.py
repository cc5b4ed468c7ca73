"""What went wrong with a job, for whoever reads the terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path

from gshard.distributed.launch.exit_status import End, first_cause, in_words, meaning
from gshard.distributed.launch.job import Outcome

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
