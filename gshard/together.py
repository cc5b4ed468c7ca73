"""Work that succeeds on every process or fails on every process; none waits for one that gave up.

Unlike the comparison of batches (`gshard.exchange`) it waits as long as it takes: one process may
have much to write while the others have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from gshard.errors import GShardError
from gshard.exchange import all_say

T = TypeVar("T")

_TEXT = 1024  # bytes of an error that the others are told


def together(act: Callable[[], T], mesh: Mesh) -> T:
    """What `act()` returns, once it has succeeded on every process that has a device in the mesh.

    Every one of them calls this; it is a barrier between them. What `act` does in collectives it
    must do on all of them, whatever fails in between.

    Raises:
      Exception: what `act` raised here.
      GShardError: `act` failed on another process, which is named with what it said; or this
        process has no device in the mesh.
    """
    if not mesh.is_multi_process:
        return act()
    if not mesh.local_devices:
        raise GShardError(
            f"process {jax.process_index()} has no device in the mesh of the plan. Only processes "
            "that have one make this call."
        )
    result: Any = None
    fault: Exception | None = None
    try:
        result = act()
    except Exception as error:
        fault = error
    said = all_say(_words(fault).ljust(_TEXT, b"\0"), mesh)
    if fault is not None:
        raise fault
    for rank, text in said.items():
        if words := text.rstrip(b"\0").decode(errors="ignore"):
            raise GShardError(f"process {rank} failed, and with it this call on all: {words}")
    return result


def _words(fault: Exception | None) -> bytes:
    if fault is None:
        return b""
    kind = "" if isinstance(fault, GShardError) else f"{type(fault).__name__}: "
    return f"{kind}{fault}".encode(errors="replace")[:_TEXT]
