"""Work that succeeds on every process or fails on every process; none waits for one that gave up.

Unlike the comparison of batches (`gshard.agreement`) it waits as long as it takes: one process may
have much to write while the others have nothing to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError
from gshard.distributed.agree import tell_processes

T = TypeVar("T")


class FailedError(GShardError):
    """What was asked is right, and could not be done on some process: a disk is full, or gone."""

    def __init__(self, reasons: Mapping[int, str]):
        one = jax.process_count() == 1
        texts = [text if one else f"process {rank}: {text}" for rank, text in reasons.items()]
        super().__init__("; ".join(texts))


def together(act: Callable[[], T], mesh: Mesh | None = None, *, what: Callable[[], str] = str) -> T:
    """What `act` gives this process, once it has succeeded on all.

    Every one of them calls this; it is a barrier between them. What `act` does in collectives it
    must do on all of them, whatever fails in between.

    Args:
      act: of this process.
      mesh: all processes with a device in it; by default all there are.
      what: says, after `act`, what has to be the same on every process.

    Raises:
      GShardError: `act` raised one on some process, raised on all; or this process has no device
        in the mesh.
      FailedError: `act` raised anything else on some.
    """
    if mesh is not None and not mesh.local_devices:
        raise GShardError(
            f"process {jax.process_index()} has no device in the mesh of the plan. Only processes "
            "that have one make this call."
        )
    result: Any = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as failure:
        error = failure
    told = {"what": what(), "why": words(error), "input": isinstance(error, GShardError)}
    said = {rank: json.loads(x) for rank, x in tell_processes(json.dumps(told), mesh).items()}
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
