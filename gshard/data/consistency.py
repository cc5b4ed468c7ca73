"""Checks that the processes agree about a batch: same arrays, and as many examples per device.

JAX does not check this: with 4 examples on one process and 6 on another, each makes a global array
of its own shape, and training continues with wrong values. So a process compares its batch with
those of the others whenever the batch differs in form from that of its last call; an unchanged form
is only compared on the host. Loaders are compared when a `for` begins.
"""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np

from gshard._util.errors import GShardError, UnevenInputsError, some, warn
from gshard._util.pytree import flatten
from gshard.distributed.agree import refuse_given_up, tell, tell_all
from gshard.sharding.plan import Plan

LOOKS = 8
"""Calls in which it is looked for data, until there is some: zeros and the like are none."""


@dataclasses.dataclass
class _Agreed:
    """The form that the processes of a plan agreed on; the same on each of them."""

    last: Any = None
    shapes: Sequence[tuple[int, ...]] = ()
    looks: int = 0  # number of further calls whose data is compared


_known: weakref.WeakKeyDictionary[Plan, _Agreed] = weakref.WeakKeyDictionary()


def compare_batches(
    batch: Any,
    plan: Plan,
    places: Mapping[int, AbstractSet[int]],
    fault: GShardError | None,
) -> None:
    """Compares this process's batch with those of the others, unless its form has not changed.

    Every process that has a device in the mesh calls this, before any of them may raise.

    Args:
      batch: a tree of the arrays that are not global yet, with this process's examples.
      plan: a plan whose mesh spans several processes.
      places: indices in the data group by process, as `positions_by_process` returns them.
      fault: why this process cannot place its batch, which the others are told; None if it can.

    Raises:
      GShardError: this or another process has a fault, arrays or numbers of examples differ, or a
        process did not join the comparison.
    """
    refuse_given_up(plan)
    leaves, structure = jax.tree.flatten(batch)
    shapes = [getattr(x, "shape", ()) for x in leaves]
    now = (structure, [getattr(x, "dtype", type(x)) for x in leaves], shapes)
    known = _known.setdefault(plan, _Agreed(looks=LOOKS))
    if known.last == now and not known.looks:
        if fault is not None:
            raise fault
        return
    was = (
        count_examples(known.shapes)
        if known.last is not None and known.last[:2] == now[:2]
        else None
    )
    change = _describe_change(was, count_examples(shapes))
    mine = summarize_batch(batch, fault)
    said = _check_same_call(tell(f"batch\n{mine}", plan, change, fault), "batch")
    if fault is not None:
        raise fault
    found = {rank: BatchSummary.read(text) for rank, text in said.items()}
    _compare_arrays(found, mine, plan, change)
    _compare_counts(found, places)
    _compare_data(found, places, known.looks > 0)
    known.last, known.shapes = now, shapes
    known.looks = 0 if all(x.says for x in found.values()) else max(0, known.looks - 1)


def compare_loaders(state: Mapping[str, int], example: Sequence[str], plan: Plan) -> None:
    """Compares the arguments, data and position of this process's loader with the others'.

    Raises:
      GShardError: names what differs, and on which process.
    """
    change = "a for over a DataLoader begins on this process"
    words = "\n".join(example)
    mine = json.dumps({**state, "example": zlib.crc32(words.encode())})
    said = _check_same_call(tell(f"loader\n{mine}", plan, change), "loader")
    found = {rank: json.loads(text) for rank, text in said.items()}
    differ = [n for n in [*state, "example"] if len({x[n] for x in found.values()}) > 1]
    if "example" in differ:
        given = _differing(tell_all(words, plan, change))
        raise GShardError(
            f"the examples of the processes' DataLoaders differ: {given}. Give every process the "
            "same source and transform."
        )
    if differ:
        given = "; ".join(
            f"{name}: {some((f'{x[name]} on process {r}' for r, x in found.items()), 8)}"
            for name in differ
        )
        raise GShardError(
            f"the processes' DataLoaders differ in {given}. Each reads its own rows of one order: "
            "make all of them with the same arguments and the same data (checksum is of its first "
            "and last row), and load the same state on all (epoch, position)."
        )


def _check_same_call(said: Mapping[int, str], mine: str) -> dict[int, str]:
    """Checks that all processes make the same call, and returns their texts without its name."""
    kinds = {rank: text.partition("\n")[0] for rank, text in said.items()}
    if set(kinds.values()) != {mine}:
        what = {"batch": "gives a batch", "loader": "begins a for over a DataLoader"}
        given = some((f"process {rank} {what.get(kind)}" for rank, kind in kinds.items()), 8)
        raise GShardError(
            f"the processes are at different places of the program: {given}. All of them make the "
            "same calls, in the same order."
        )
    return {rank: text.partition("\n")[2] for rank, text in said.items()}


def _describe_change(was: int | None, now: int) -> str:
    if was is None:
        return f"this process gave {now} rows of other arrays than before"
    if was == now:
        return f"the shapes of this process's arrays changed (it still gives {now} rows)"
    return f"this process's rows changed from {was} to {now}"


def _compare_arrays(
    found: Mapping[int, BatchSummary], mine: BatchSummary, plan: Plan, change: str
) -> None:
    """Refuses batches of different arrays; the result is the same on every process."""
    for rank, x in found.items():
        if not x.can:
            raise GShardError(f"process {rank} cannot place its batch: {x.text}")
    if len({x.kind for x in found.values()}) > 1:
        given = _differing(tell_all(mine.text, plan, change))
        raise GShardError(
            f"the processes gave batches of different arrays; {given}. Every process must give the "
            "same tree, with the same dtypes, shapes and scalars, and its own rows of it."
        )


def _differing(texts: Mapping[int, str]) -> str:
    """Formats the lines of each process's text that not all processes have."""
    lines = {rank: text.split("\n") for rank, text in texts.items()}
    everywhere = set.intersection(*(set(own) for own in lines.values()))
    only = {rank: [x for x in own if x not in everywhere] for rank, own in lines.items()}
    # The tree structure only helps if the arrays are the same.
    arrays = {rank: [x for x in own if not x.startswith("tree ")] for rank, own in only.items()}
    shown = arrays if any(arrays.values()) else only
    return some(
        (
            f"process {rank}: {some((x[:300] for x in own), 4) or 'none'}"
            for rank, own in shown.items()
        ),
        8,
    )


def _compare_counts(
    found: Mapping[int, BatchSummary], places: Mapping[int, AbstractSet[int]]
) -> None:
    first = next(iter(found))
    rows = {rank: x.rows for rank, x in found.items()}
    if any(n * len(places[first]) != rows[first] * len(places[r]) for r, n in rows.items()):
        given = some((f"process {r} gave {n} for {len(places[r])}" for r, n in rows.items()), 16)
        raise UnevenInputsError(
            f"Every process must give the same number of rows for each of its devices: {given}. "
            "Give all of them the same; drop the last, smaller batch of uneven data, or pad it "
            "with rows of weight 0 (gshard.Weighted). gshard.DataLoader does the dividing itself."
        )


def _compare_data(
    found: Mapping[int, BatchSummary], places: Mapping[int, AbstractSet[int]], look: bool
) -> None:
    groups: dict[frozenset[int], list[int]] = {}
    for rank in found:
        groups.setdefault(frozenset(places[rank]), []).append(rank)
    for ranks in groups.values():
        if len({found[rank].data for rank in ranks}) > 1:
            raise GShardError(
                f"processes {some(ranks)} have devices of the same rows of the batch (axes of your "
                "own, such as tensor parallelism, lie over them) and gave different data: each "
                f"would compute with its own. {_ADVICE_OF_SHARED}"
            )
    same: dict[int, list[int]] = {}
    for rank, x in found.items():
        if look and x.says:
            same.setdefault(x.data, []).append(rank)
    own = len(groups) == len(found) and len({len(p) for p in groups}) == 1
    advice = _ADVICE if own and len(found) == jax.process_count() else _ADVICE_OF_SHARED
    for ranks in same.values():
        if any(places[r].isdisjoint(places[ranks[0]]) for r in ranks):
            warn(
                f"processes {some(ranks)} gave the same data, by some bytes of every row. {advice} "
                "Otherwise they probably all compute the same gradient."
            )


_ADVICE = (
    "Each must take its own rows, such as "
    "x[gshard.distributed.process_index() :: gshard.distributed.process_count()] of the "
    "whole; gshard.DataLoader takes each process's rows."
)
_ADVICE_OF_SHARED = (
    "Processes with the same place on the data axes must take the same rows, and those with "
    "another place other rows, as many as they have places; gshard.DataLoader does that."
)


HASHED = 1 << 20
"""Bytes of each array, of every row some, that tell whether two processes give the same data."""


class BatchSummary(NamedTuple):
    """A summary of the batch of one process."""

    can: bool  # whether the process can place its batch
    kind: int  # checksum of `text`
    data: int  # checksum of some bytes of every example
    says: bool  # whether these bytes are data: not all entries are equal
    rows: int
    text: str  # the arrays, one per line; or why the process cannot place them

    def __str__(self) -> str:
        return f"{self.can:d} {self.kind} {self.data} {self.says:d} {self.rows}\n{self.text}"

    @classmethod
    def read(cls, said: str) -> BatchSummary:
        """Parses `str(summary)`, whose text may have been cut."""
        head, _, text = said.partition("\n")
        can, kind, data, says, rows = map(int, head.split())
        return cls(bool(can), kind, data, bool(says), rows, text)


def summarize_batch(batch: Any, fault: GShardError | None) -> BatchSummary:
    """Summarizes this process's batch, or its fault."""
    paths, leaves, structure = flatten(batch)
    rows = count_examples([getattr(x, "shape", ()) for x in leaves])
    if fault is not None:
        return BatchSummary(False, 0, 0, False, rows, str(fault))
    words = []
    for path, x in zip(paths, leaves, strict=True):
        shape = getattr(x, "shape", ())
        own = ["rows" if n == rows else str(n) for n in shape[:1]] + [str(n) for n in shape[1:]]
        value = "" if shape else f" = {x}"
        dtype = getattr(x, "dtype", type(x).__name__)
        words.append(f"{path or 'batch'} {dtype}[{', '.join(own)}]{value}")
    text = "\n".join([*words, describe_structure(structure)])
    return BatchSummary(True, zlib.crc32(text.encode()), *_checksum(leaves), rows, text)


def describe_structure(structure: Any) -> str:
    """Describes a tree structure by a text that is the same in every process."""
    return "tree " + re.sub(r" at 0x[0-9a-f]+", "", str(structure)).removeprefix("PyTreeDef")


def count_examples(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of examples of the first array, or 0 if there are only scalars."""
    return next((shape[0] for shape in shapes if shape), 0)


def _checksum(leaves: Sequence[Any]) -> tuple[int, bool]:
    """Returns a checksum of this process's examples, and whether they are data.

    Scalars are the same everywhere and are left out. Arrays of equal entries are not data.
    """
    found, says = 0, False
    for x in leaves:
        if not np.ndim(x) or not np.size(x):
            continue
        x = np.asarray(x)
        entries = x.reshape(x.shape[0], -1)
        # Bytes of every example, since the first ones may be a header or padding.
        every = -(-entries.nbytes // HASHED)
        some = np.ascontiguousarray(entries[:, ::every]).reshape(-1)
        as_bytes = some.view(np.uint8).reshape(some.size, -1)  # as bytes, NaN is equal to itself
        says |= bool((as_bytes != as_bytes[:1]).any())
        found = zlib.crc32(as_bytes.tobytes(), found)
    return found, says
