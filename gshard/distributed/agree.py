"""Exchanges texts between the processes of a mesh, outside the step, by all-gathers.

The first has a hash of each text and its beginning. A long text follows where the hashes differ,
which they rarely do. Each waits for the others; the watchdog says so where that takes long, and
ends a job that hangs.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gshard._util.activity import doing, meet
from gshard._util.arrays import identity, replicated_value
from gshard._util.errors import GShardError, OutsideError, is_outside, some, warn
from gshard.sharding.plan import Plan

FAULT_TIMEOUT, FAULT_WARN_AFTER = 30.0, 3.0
"""Seconds that a process with an error to raise waits for the others to learn of it, and warns."""

_CALLS = {
    "batch": "gives a batch",
    "loader": "starts a `for` loop over a DataLoader",
    "state": "shards a train state",
    "auto": "shards a train state at level='auto'",
    "program": "compiles a step",
    "hyperparameters": "compares hyperparameters, in set_lr, a state dict or a step",
    "losses": "compares the losses that it has traced",
    "values": "sets a state dict",
}
_DATA = "a comparison of data"
_WAITS = {
    "state": "shard_train_state",
    "program": "a comparison of programs",
    "hyperparameters": "a comparison of hyperparameters",
    "values": "a comparison of the state dicts that all processes set",
}
_TEXT = 1024  # bytes of a text that are sent where not all of it is needed
_HEADER = struct.Struct("<I16s")  # number of bytes, and a hash
_FIRST = 128 - _HEADER.size  # bytes of a text in the first message; most are not longer


def spans_processes(plan: Plan) -> bool:
    """Whether this process has something to compare with the others of the plan's mesh.

    A single process may have a mesh that spans several if it only compiles for the devices.
    """
    mesh = plan.mesh
    if not isinstance(mesh, Mesh) or not mesh.is_multi_process or jax.process_count() == 1:
        return False
    return bool(mesh.local_devices)


def exchange_texts(
    text: str, plan: Plan, change: str, fault: GShardError | None = None, *, full: bool = False
) -> dict[int, str]:
    """All-gathers a text from every process of the mesh, by rank.

    Every process that has a device in the mesh must call it, with the same `full`.

    Args:
      text: the text of this process.
      plan: a plan whose mesh spans several processes.
      change: why this process calls, for what it says when it waits long.
      fault: the error that this process will raise once the others know, or have not come in time.
      full: whether texts longer than 1024 bytes are returned in full.
    """
    if fault is not None:
        return _exchange(text, partial(_all_gather_or_raise, fault, mesh=plan.mesh), full)
    mesh: Any = plan.mesh
    with doing(f"{_DATA}, because {change}", waits=True, mesh=mesh):
        return _exchange(text, partial(_all_gather, mesh=mesh, call=_DATA), full)


def all_gather_text(
    text: str, mesh: Mesh | None = None, *, what: str, shown: str = ""
) -> dict[int, str]:
    """All-gathers a text of any length from every process (of a mesh, if one is given), by rank.

    `what` names the call, the same on all; `shown` is what the watchdog says of it instead.
    """
    if not mesh.is_multi_process if mesh is not None else jax.process_count() == 1:
        return {jax.process_index(): text}
    everyone = Mesh(np.array(jax.devices()), ("all",)) if mesh is None else mesh
    with doing(shown or what, waits=True, mesh=mesh):
        return _exchange(text, partial(_all_gather, mesh=everyone, call=what), full=True)


def check_same_call(texts: Mapping[int, str], call: str) -> dict[int, str]:
    """Checks that all processes make the same call, and returns their texts without its name.

    A text begins with a line that names the call, one of `_CALLS`.
    """
    calls = {rank: text.partition("\n")[0] for rank, text in texts.items()}
    if set(calls.values()) != {call}:
        given = by_value({r: _CALLS.get(x, "does something else") for r, x in calls.items()})
        raise GShardError(
            f"the processes do not make the same call: {given}. All of them must make the same "
            "calls, in the same order."
        )
    return {rank: text.partition("\n")[2] for rank, text in texts.items()}


def find_differences(
    call: str, facts: Mapping[str, Sequence[str]], mesh: Mesh, shown: str = ""
) -> list[str]:
    """Returns the names of the facts that differ between the processes of a mesh, in order.

    Every process of the mesh must call it. A fact is a list of lines, of which a hash is compared.
    `shown` is what the watchdog calls it, as in `all_gather_text`.
    """
    hashes = {name: hash_of(lines) for name, lines in facts.items()}
    texts = all_gather_text(f"{call}\n{json.dumps(hashes)}", mesh, what=_WAITS[call], shown=shown)
    found = [json.loads(text) for text in check_same_call(texts, call).values()]
    return [name for name in facts if any(x.get(name) != found[0].get(name) for x in found)]


def first_difference(lines: Sequence[str], mesh: Mesh) -> dict[int, str]:
    """Returns the first line that differs between the processes of a mesh, by rank.

    It compares hashes of the first lines, by bisection, so that texts of any length are cheap. All
    processes must call it, when they know that they differ. A missing line is empty.
    """
    gather = partial(all_gather_text, mesh=mesh, what="a comparison of what differs")
    lengths = [int(text) for text in gather(str(len(lines))).values()]
    same, differ = 0, max(lengths)
    while differ - same > 1:
        middle = (same + differ) // 2
        hashes = gather(hash_of([*lines[:middle], f"{min(middle, len(lines))}"]))
        same, differ = (same, middle) if len(set(hashes.values())) > 1 else (middle, differ)
    return gather(lines[same] if same < len(lines) else "")


def by_value(texts: Mapping[int, str]) -> str:
    """Formats what each process has: `1e-3 on processes 0, 2, 1e-2 on process 1`.

    What few have is named too, however many processes there are.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return some((f"{text or 'nothing'} on {processes(own)}" for text, own in ranks.items()), 4)


def processes(ranks: Sequence[int]) -> str:
    """`process 1`, or `processes 0, 2 and 3 more`."""
    return f"process{'es' if len(ranks) > 1 else ''} {some(ranks)}"


def hash_of(lines: Sequence[str]) -> str:
    """Returns a short hash of lines of text."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _exchange(
    text: str, all_gather: Callable[[bytes], dict[int, bytes]], full: bool
) -> dict[int, str]:
    encoded, size = text.encode(), _FIRST
    header = _HEADER.pack(len(encoded), hashlib.blake2b(encoded, digest_size=16).digest())
    while True:
        found = all_gather(header + encoded[:size].ljust(size, b"\0"))
        headers = {_HEADER.unpack_from(message) for message in found.values()}
        if len(headers) == 1:  # all have this text
            return dict.fromkeys(found, text)
        longest = max(length for length, _ in headers)
        needed = longest if full else min(longest, _TEXT)
        if needed <= size:
            break
        size = 1 << (needed - 1).bit_length()  # few sizes: each is a program
    texts = [message[_HEADER.size :].rstrip(b"\0") for message in found.values()]
    return {r: x.decode(errors="ignore") for r, x in zip(found, texts, strict=True)}


def _all_gather_or_raise(fault: GShardError, message: bytes, mesh: Any) -> dict[int, bytes]:
    """All-gathers a message that tells of a fault; raises that if the others do not come."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(_all_gather(message, mesh, _DATA))
        except Exception as error:  # raised where the caller waits
            result.append(error)

    # In a separate thread: a thread cannot give up a collective that it waits for.
    thread = threading.Thread(target=run, name="gshard-agreement", daemon=True)
    thread.start()
    thread.join(FAULT_WARN_AFTER)
    if thread.is_alive():
        warn(
            f"This process has found an error: {fault} It has waited {FAULT_WARN_AFTER:g} s to "
            "tell the other processes of it, but they have not made this call. It waits "
            f"{FAULT_TIMEOUT - FAULT_WARN_AFTER:g} s more, then raises the error."
        )
        thread.join(FAULT_TIMEOUT - FAULT_WARN_AFTER)
    if result and isinstance(result[0], dict):
        return result[0]
    fault.add_note("The other processes do not know of this error: start the job again.")
    raise fault from (result[0] if result else None)


def _all_gather(message: bytes, mesh: Mesh, call: str) -> dict[int, bytes]:
    """All-gathers messages of equal length from every process of the mesh; waits for all.

    `process_allgather` would also wait for processes without a device in the mesh, and needs the
    same number of devices on each.
    """
    by_process = _mesh_of_processes(mesh)
    ranks = [device.process_index for device in by_process.devices[:, 0]]
    meet(ranks, call)
    mine = np.frombuffer(message, np.uint8)[None]
    sharded = NamedSharding(by_process, jax.P("process"))
    full = NamedSharding(by_process, jax.P())
    with jax.transfer_guard("allow"), jax.disable_jit(False):  # else nothing is gathered
        sent = jax.make_array_from_callback((len(ranks), mine.size), sharded, lambda _: mine)
        got = replicated_value(jax.jit(identity, out_shardings=full)(sent))
    return {rank: row.tobytes() for rank, row in zip(ranks, got, strict=True)}


def _mesh_of_processes(mesh: Mesh) -> Mesh:
    """A mesh with a row for each process, of the devices that it has in another mesh.

    Where some have more than others, not all of theirs take part.
    """
    rows: dict[int, list[Any]] = {}
    for device in sorted(mesh.devices.flat, key=lambda d: d.id):  # the order may differ
        rows.setdefault(device.process_index, []).append(device)
    least = min(len(row) for row in rows.values())
    return Mesh(np.array([rows[rank][:least] for rank in sorted(rows)]), ("process", "device"))


T = TypeVar("T")


class FailedError(GShardError):
    """A valid request failed on some process, for example because a disk is full or gone."""

    def __init__(self, reasons: Mapping[int, str]):
        one = jax.process_count() == 1
        texts = [text if one else f"process {rank}: {text}" for rank, text in reasons.items()]
        super().__init__("; ".join(texts))


class FailedOutsideError(FailedError, OutsideError):
    """A `FailedError` whose reasons come from outside the program, such as a disk."""


def run_on_all(
    act: Callable[[], T], mesh: Mesh | None = None, *, call: str, what: Callable[[], str] = str
) -> T:
    """Runs `act` on every process, and returns its result once it has succeeded on all of them.

    Every process (of the mesh, if one is given) must call this; it is a barrier. If `act` runs
    collectives, it must run the same ones on every process, whatever fails in between. `call` names
    it for the watchdog. `what` is called after it and returns a text that must be the same on every
    process.

    Raises:
      GShardError: `act` raised one on some process; it is raised on all.
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
        with doing(call):
            result = act()
    except Exception as failure:
        # A clean-up of Python's that Ctrl-C interrupts may fail of it, as `shutil.rmtree` does.
        if isinstance(failure.__context__, KeyboardInterrupt):
            raise failure.__context__ from None
        error = failure
    mine = {"what": what(), "why": _one_line(error), "input": isinstance(error, GShardError)}
    mine["outside"] = is_outside(error)
    texts = all_gather_text(json.dumps(mine), mesh, what=call)
    found = {rank: json.loads(text) for rank, text in texts.items()}
    if len({other["what"] for other in found.values()} - {""}) > 1:
        others = ", ".join(f"{x['what']} (process {rank})" for rank, x in found.items())
        raise GShardError(
            f"the processes made different calls: {others}. Make the same calls on every process."
        )
    if isinstance(error, GShardError):
        raise error
    for rank, other in found.items():
        if other["input"]:
            kind = OutsideError if other["outside"] else GShardError
            raise kind(f"process {rank}: {other['why']}")
    if reasons := {rank: other["why"] for rank, other in found.items() if other["why"]}:
        outside = all(found[rank]["outside"] for rank in reasons)
        raise (FailedOutsideError if outside else FailedError)(reasons) from error
    return result


def _one_line(error: Exception | None) -> str:
    """Describes an error on one line; empty if there is none."""
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    is_ours = isinstance(error, GShardError) or type(error).__module__.startswith("gshard.")
    return text if is_ours else f"{type(error).__name__}: {text}"[:600]
