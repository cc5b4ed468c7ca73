"""Whether the processes agree about a batch: the same arrays, and the same rows for every device.

JAX does not ask: with 4 rows on one process and 6 on another each makes a global array of its own
shape, and training goes on with numbers that are nobody's. So what a process gives is compared with
the others' in one small all-gather, whenever it differs from what this process gave before; a call
that changes nothing is compared on the host alone.
"""

from __future__ import annotations

import struct
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gshard.errors import GShardError, some, warn
from gshard.plan import Plan
from gshard.tree import flatten

LIMIT = 300.0
"""Seconds that a process waits for the others to compare; they may be saving or evaluating."""
PATIENCE = 30.0
"""Seconds after which it says that it waits."""
HASHED = 1 << 20
"""Bytes of each array that tell whether two processes give the same data."""

_TEXT = 1024  # bytes: what a process gives, in words, or why it cannot
_HEAD = struct.Struct("<IIIQ")  # whether it can, arrays, data, rows

# What each plan's processes agreed on: the shapes of arrays, by their tree and dtypes. So two kinds
# of batch in turn (with targets and without) are compared once each.
_agreed: weakref.WeakKeyDictionary[Plan, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def agree(
    batch: Any,
    plan: Plan,
    places: Mapping[int, AbstractSet[int]],
    fault: GShardError | None,
) -> None:
    """Compares what this process gives with what the others give, unless it is what it gave before.

    Called by every process that has a device in the mesh, before any of them may raise.

    Args:
      batch: the arrays that are not global yet, with this process's rows; any tree.
      plan: its mesh spans several processes.
      places: of the data group, by the process that has a device of them.
      fault: why this process cannot place its batch; the others are told.

    Raises:
      GShardError: `fault`; another process's; arrays or rows that differ; or a process that did not
        come to compare.
    """
    leaves, structure = jax.tree.flatten(batch)
    kind = (structure, [getattr(x, "dtype", type(x)) for x in leaves])
    shapes = [getattr(x, "shape", ()) for x in leaves]
    agreed = _agreed.setdefault(plan, [])
    before = next((i for i, known in enumerate(agreed) if known[0] == kind), None)
    if before is not None and agreed[before][1] == shapes:
        if fault is not None:
            raise fault
        return
    was = None if before is None else _rows(agreed[before][1])
    mine = _message(batch, fault, with_data=not agreed)
    try:
        found = _exchange(mine, plan.mesh, _change(was, _rows(shapes)))
    except GShardError as error:
        raise fault or error from error.__cause__
    if fault is not None:
        raise fault
    _compare({rank: _read(x) for rank, x in found.items()}, places)
    if before is None:
        agreed.append((kind, shapes))
    else:
        agreed[before] = (kind, shapes)


def _rows(shapes: Sequence[tuple[int, ...]]) -> int:
    """Rows of the first array that has some; 0 when there are only scalars."""
    return next((shape[0] for shape in shapes if shape), 0)


def _change(was: int | None, now: int) -> str:
    if was is None:
        return f"this process gave {now} rows of arrays that are new to this plan"
    if was == now:
        return f"the shapes of this process's arrays changed (it still gives {now} rows)"
    return f"this process's rows changed from {was} to {now}"


def _message(batch: Any, fault: GShardError | None, with_data: bool) -> bytes:
    """What this process tells the others, `_HEAD.size + _TEXT` bytes."""
    paths, leaves, _ = flatten(batch)
    rows = _rows([getattr(x, "shape", ()) for x in leaves])
    words = []
    for path, x in zip(paths, leaves, strict=True):
        shape = getattr(x, "shape", ())
        own = ["rows" if n == rows else str(n) for n in shape[:1]] + [str(n) for n in shape[1:]]
        dtype = getattr(x, "dtype", type(x).__name__)
        words.append(f"{path or 'batch'} {dtype}[{', '.join(own)}]")
    text = ", ".join(words)
    kind, data = zlib.crc32(text.encode()), 0
    if fault is not None:
        text = str(fault)
    elif with_data:
        data = _checksum(leaves)
    short = text.encode()
    if len(short) > _TEXT:
        short = short[: _TEXT - 3].decode(errors="ignore").encode() + b"..."
    return _HEAD.pack(fault is None, kind, data, rows) + short.ljust(_TEXT, b"\0")


def _read(message: bytes) -> tuple[bool, int, int, int, str]:
    """Whether a process can place its batch, its arrays, data and rows, and the words."""
    can, kind, data, rows = _HEAD.unpack_from(message)
    return bool(can), kind, data, rows, message[_HEAD.size :].rstrip(b"\0").decode()


def _checksum(leaves: Sequence[Any]) -> int:
    """A number that tells this process's rows from another's; 0 when they say nothing.

    Scalars are the same everywhere, and an array whose entries are all equal is no data yet.
    """
    found, says = 0, False
    for x in leaves:
        if not np.ndim(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            continue
        x = np.asarray(x).reshape(-1)
        head = np.ascontiguousarray(x[: HASHED // x.itemsize])
        says |= bool((head != head[:1]).any())
        found = zlib.crc32(head.tobytes(), found)
    return (found or 1) if says else 0


def _compare(
    found: Mapping[int, tuple[bool, int, int, int, str]], places: Mapping[int, AbstractSet[int]]
) -> None:
    """The same on every process, so that all of them raise, or none."""
    for rank, (can, *_, text) in found.items():
        if not can:
            raise GShardError(f"process {rank} cannot place its batch: {text}")
    if len({kind for _, kind, *_ in found.values()}) > 1:
        given = some((f"process {rank}: {text}" for rank, (*_, text) in found.items()), 8)
        raise GShardError(
            f"the processes gave batches of different arrays; {given}. Every process must give the "
            "same tree, with the same dtypes and shapes, and its own rows of it."
        )
    first = next(iter(found))
    rows = {rank: n for rank, (_, _, _, n, _) in found.items()}
    if any(n * len(places[first]) != rows[first] * len(places[r]) for r, n in rows.items()):
        given = some((f"process {r} gave {n} for {len(places[r])}" for r, n in rows.items()), 16)
        raise GShardError(
            f"Every process must give the same number of rows for each of its devices: {given}. "
            "Give all of them the same; drop the last, smaller batch of uneven data, or pad it "
            "with rows of weight 0 (gshard.Weighted). gshard.DataLoader does the dividing itself."
        )
    same: dict[int, list[int]] = {}
    for rank, (_, _, data, _, _) in found.items():
        if data:
            same.setdefault(data, []).append(rank)
    for ranks in same.values():
        # Processes that share a place of the data group (tensor parallelism) must give the same.
        if any(places[r].isdisjoint(places[ranks[0]]) for r in ranks):
            warn(
                f"processes {some(ranks)} gave the same data. Each must take its own rows, such as "
                "x[gshard.get_rank() :: gshard.get_world_size()] of the whole; otherwise they all "
                "compute the same gradient. gshard.DataLoader takes each process's rows."
            )


def _same(x: jax.Array) -> jax.Array:
    return x


def _exchange(message: bytes, mesh: Any, change: str) -> dict[int, bytes]:
    """What every process of the mesh says, by rank.

    Over the devices of the mesh, as the step's own collectives: `process_allgather` would wait for
    processes without a device in it, and wants as many devices on each.
    """
    devices = list(mesh.devices.flat)
    flat = Mesh(np.array(devices), ("all",))
    mine = np.frombuffer(message, np.uint8)[None]
    result: list[Any] = []

    def run() -> None:
        try:
            rows = NamedSharding(flat, jax.P("all"))
            shape = (len(devices), mine.size)
            sent = jax.make_array_from_callback(shape, rows, lambda _: mine)
            got = jax.jit(_same, out_shardings=NamedSharding(flat, jax.P()))(sent)
            result.append(np.asarray(got.addressable_data(0)))
        except Exception as error:  # raised where the caller waits
            result.append(error)

    # In a thread of its own: no collective can be given up from the one that waits for it.
    thread = threading.Thread(target=run, name="gshard-agreement", daemon=True)
    thread.start()
    thread.join(min(PATIENCE, LIMIT))
    wait = LIMIT - PATIENCE
    if thread.is_alive() and wait > 0:
        warn(
            f"{change}, and for {PATIENCE:g} s the other processes have not come to compare theirs "
            f"with it. This process waits {wait:g} s more."
        )
        thread.join(wait)
    got = result[0] if result else None
    if not isinstance(got, np.ndarray):
        why = f"within {LIMIT:g} s" if got is None else f"({got})"
        raise GShardError(
            f"{change}, and the other processes did not follow {why}. Either they gave what they "
            "gave before, as with a last, smaller batch of uneven data (drop it, or pad it with "
            "rows of weight 0, gshard.Weighted), or they came to no batch at all, or have ended. "
            "Every process must give the same number of rows in every call."
        ) from got
    ranks = {d.process_index: row for d, row in zip(devices, got, strict=True)}
    return {rank: ranks[rank].tobytes() for rank in sorted(ranks)}
