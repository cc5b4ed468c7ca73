"""Exchanges short texts between the processes of a mesh, outside the step, in one all-gather.

A process that waits too long for the others warns, and then gives up. Its next collective would
never match theirs, so it refuses every later exchange with the same plan.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gshard._util.errors import GShardError, warn
from gshard._util.validation import check_integer
from gshard.distributed import env_vars
from gshard.sharding.plan import Plan

LIMIT = 300
"""Seconds that a process waits for the others; they may be saving or evaluating."""
PATIENCE = 30.0
"""Seconds after which it says that it waits; all that it waits for to tell them of a fault."""
SOON = 3.0
"""Seconds after which it says a fault that the others have not come for."""

_TEXT = 1024  # bytes of the first message; what is longer is told again where it is needed
_LENGTH = struct.Struct("<I")
_given_up: weakref.WeakSet[Plan] = weakref.WeakSet()


def tell(text: str, plan: Plan, change: str, fault: GShardError | None = None) -> dict[int, str]:
    """All-gathers a text of at most 1024 bytes from every process of the mesh, by rank.

    Every process that has a device in the mesh must call it.

    Args:
      text: the text of this process; a longer one is cut off, see `tell_all`.
      plan: a plan whose mesh spans several processes.
      change: why this process calls, for its warning and error when the others do not.
      fault: the error that this process will raise once the others know.

    Raises:
      GShardError: the others did not call it; `fault` with a note, if there is one.
    """
    return _tell(text, _TEXT, plan, change, fault)[0]


def tell_all(text: str, plan: Plan, change: str) -> dict[int, str]:
    """Like `tell`, for texts of any length; every process must know that all of them call it."""
    found, longest = _tell(text, _TEXT, plan, change, None)
    return found if longest <= _TEXT else _tell(text, longest, plan, change, None)[0]


def tell_processes(text: str, mesh: Mesh | None = None) -> dict[int, str]:
    """All-gathers a text of any length from every process, by rank.

    It waits without a limit, since the others may be writing to a slow disk.

    Args:
      text: the text of this process.
      mesh: its processes take part; by default all processes do.
    """
    alone = not mesh.is_multi_process if mesh is not None else jax.process_count() == 1
    if alone:
        return {jax.process_index(): text}
    everyone = Mesh(np.array(jax.devices()), ("all",)) if mesh is None else mesh
    found, longest = _unpacked(_meet(_packed(text, _TEXT), everyone))
    if longest > _TEXT:
        found, _ = _unpacked(_meet(_packed(text, longest), everyone))
    return found


def refuse_given_up(plan: Plan) -> None:
    """Raises a `GShardError` if this process gave up waiting for the others of a plan."""
    if plan in _given_up:
        raise GShardError(
            "this process gave up waiting for the others in an earlier call with this plan, and "
            "its calls no longer meet theirs: start the job again."
        )


def _tell(
    text: str, size: int, plan: Plan, change: str, fault: GShardError | None
) -> tuple[dict[int, str], int]:
    """Returns the texts, and the number of bytes of the longest."""
    refuse_given_up(plan)
    limit = _limit()
    message = _packed(text, size)
    try:
        found = _exchange(message, plan.mesh, change, fault, limit)
    except GShardError as error:
        _given_up.add(plan)
        if fault is None:
            raise
        fault.add_note("The other processes did not come to be told: start the job again.")
        raise fault from error.__cause__
    return _unpacked(found)


def _packed(text: str, size: int) -> bytes:
    long = text.encode()
    return _LENGTH.pack(len(long)) + long[:size].ljust(size, b"\0")


def _unpacked(found: dict[int, bytes]) -> tuple[dict[int, str], int]:
    lengths = [_LENGTH.unpack_from(said)[0] for said in found.values()]
    texts = [said[_LENGTH.size :].rstrip(b"\0").decode(errors="ignore") for said in found.values()]
    return dict(zip(found, texts, strict=True)), max(lengths)


def _limit() -> float:
    given = env_vars.read_integer(env_vars.AGREEMENT_TIMEOUT)
    if given is None:
        return LIMIT
    return check_integer(env_vars.AGREEMENT_TIMEOUT, given, 1, " of seconds")


def _same(x: jax.Array) -> jax.Array:
    return x


def _exchange(
    message: bytes, mesh: Any, change: str, fault: GShardError | None, limit: float
) -> dict[int, bytes]:
    """All-gathers a message from every process of the mesh; gives up after `limit` seconds."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(_meet(message, mesh))
        except Exception as error:  # raised where the caller waits
            result.append(error)

    # In a separate thread: a thread cannot give up a collective that it waits for.
    thread = threading.Thread(target=run, name="gshard-agreement", daemon=True)
    started = time.monotonic()
    thread.start()
    whole = limit if fault is None else min(PATIENCE, limit)
    first = PATIENCE if fault is None else SOON
    thread.join(min(first, whole))
    wait = whole - first
    if thread.is_alive() and wait > 0:
        why = f"{change}, and" if fault is None else f"This process will raise: {fault} But"
        warn(
            f"{why} for {time.monotonic() - started:.0f} s the other processes have not come to "
            f"compare theirs with it. This process waits {wait:g} s more."
        )
        thread.join(wait)
    got = result[0] if result else None
    if not isinstance(got, dict):
        why = f"within {whole:g} s" if got is None else f"({got})"
        raise GShardError(
            f"{change}, and the other processes did not follow {why}. Either they gave what they "
            "gave before, as with a last, smaller batch of uneven data (drop it, or pad it with "
            "rows of weight 0, gshard.Weighted), or they came to no batch at all, or have ended. "
            "Every process must give the same number of rows in every call. Start the job again."
        ) from got
    return got


def _meet(message: bytes, mesh: Any) -> dict[int, bytes]:
    """All-gathers messages of equal length from every process of the mesh; waits for all.

    It uses the devices of the mesh, like the step's collectives: `process_allgather` would also
    wait for processes without a device in the mesh, and needs the same number of devices on each.
    """
    devices = list(mesh.devices.flat)
    flat = Mesh(np.array(devices), ("all",))
    mine = np.frombuffer(message, np.uint8)[None]
    rows = NamedSharding(flat, jax.P("all"))
    shape = (len(devices), mine.size)
    sent = jax.make_array_from_callback(shape, rows, lambda _: mine)
    got = jax.jit(_same, out_shardings=NamedSharding(flat, jax.P()))(sent)
    said = np.asarray(got.addressable_data(0))
    ranks = {d.process_index: row for d, row in zip(devices, said, strict=True)}
    return {rank: ranks[rank].tobytes() for rank in sorted(ranks)}


T = TypeVar("T")


class FailedError(GShardError):
    """A valid request failed on some process, for example because a disk is full or gone."""

    def __init__(self, reasons: Mapping[int, str]):
        one = jax.process_count() == 1
        texts = [text if one else f"process {rank}: {text}" for rank, text in reasons.items()]
        super().__init__("; ".join(texts))


def run_on_all(
    act: Callable[[], T], mesh: Mesh | None = None, *, what: Callable[[], str] = str
) -> T:
    """Runs `act` on every process, and returns its result once it has succeeded on all of them.

    Every process must call this; it is a barrier. If `act` runs collectives, it must run the same
    ones on every process, whatever fails in between.

    Args:
      act: what this process does.
      mesh: its processes take part; by default all processes do.
      what: called after `act`; returns a text that must be the same on every process.

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
    told = {"what": what(), "why": _one_line(error), "input": isinstance(error, GShardError)}
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


def _one_line(error: Exception | None) -> str:
    """Describes an error on one line; empty if there is none."""
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, GShardError) else f"{type(error).__name__}: {text}"[:600]
