"""What all processes do at once: it holds for all of them, or for none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gshard.errors import GShardError
from gshard.exchange import tell_every_process


class FailedError(Exception):
    """The world failed on a process: a disk, a file system.

    Attributes:
      reasons: by rank.
    """

    def __init__(self, reasons: Mapping[int, str]):
        one = jax.process_count() == 1
        texts = [text if one else f"process {rank}: {text}" for rank, text in reasons.items()]
        super().__init__("; ".join(texts))


def together(act: Callable[[], Any], what: Callable[[], str] = str) -> Any:
    """What `act` gives this process, once all have done it.

    Args:
      act: of this process.
      what: says, after `act`, what has to be the same on every process.

    Raises:
      GShardError: wrong input on some process, raised on all.
      FailedError: anything else that was raised on some.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as failure:
        error = failure
    told = {"what": what(), "why": words(error), "input": isinstance(error, GShardError)}
    said = {rank: json.loads(x) for rank, x in tell_every_process(json.dumps(told)).items()}
    if len({other["what"] for other in said.values()} - {""}) > 1:
        others = ", ".join(f"{x['what']} (process {rank})" for rank, x in said.items())
        raise GShardError(f"the processes do not do the same: {others}.")
    if isinstance(error, GShardError):
        raise error
    for rank, other in said.items():
        if other["input"]:
            raise GShardError(f"process {rank}: {other['why']}")
    if reasons := {rank: other["why"] for rank, other in said.items() if other["why"]}:
        raise FailedError(reasons) from error
    return result


def words(error: Exception | None) -> str:
    """What went wrong, on one line; empty when nothing did."""
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, GShardError) else f"{type(error).__name__}: {text}"[:600]
