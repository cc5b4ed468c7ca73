"""Checks that the processes agree about a batch: same arrays, and as many examples per device.

JAX does not check this: with 4 examples on one process and 6 on another, each makes a global array
of its own shape, and training continues with wrong values. So a process compares its batch with
those of the others whenever the batch differs in form from that of its last call; an unchanged form
is only compared on the host. Loaders are compared when a `for` begins.
"""

from __future__ import annotations

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
from gshard.distributed.agree import by_value, check_same_call, exchange_texts
from gshard.distributed.traced_losses import compare_losses
from gshard.sharding.plan import Plan

DATA_COMPARISONS = 8  # calls whose data is compared if all entries of the first batches are equal
CHECKSUM_BYTES = 1 << 20  # bytes of each array in the checksum, some of every example
_ADVICE = (
    "Each process must give its own examples, such as "
    "x[gshard.distributed.process_index() :: gshard.distributed.process_count()]; "
    "gshard.DataLoader selects them for each process."
)
_ADVICE_FOR_SHARED_INDICES = (
    "Processes with the same index on the data axes must give the same examples, and processes "
    "with other indices must give others; gshard.DataLoader does that."
)


# By plan, the same on each process: the form agreed on, and the calls whose data is still compared.
_agreed: weakref.WeakKeyDictionary[Plan, tuple[Any, int]] = weakref.WeakKeyDictionary()
_calls: weakref.WeakKeyDictionary[Plan, int] = weakref.WeakKeyDictionary()


def compare_batches(
    batch: Any, plan: Plan, positions: Mapping[int, AbstractSet[int]], fault: GShardError | None
) -> None:
    """Compares this process's batch with those of the others, unless its form has not changed.

    Every process that has a device in the mesh calls this, before any of them may raise. `batch`
    has the arrays that are not global yet, `positions` is that of `positions_by_process`, and
    `fault` says why this process cannot place its batch; then the others raise too.
    """
    calls = _calls[plan] = _calls.get(plan, 0) + 1
    if calls == 2:  # the first batch has been used: its loss is traced
        compare_losses(plan)
    leaves, structure = jax.tree.flatten(batch)
    shapes = [getattr(x, "shape", ()) for x in leaves]
    form = (structure, [getattr(x, "dtype", type(x)) for x in leaves], shapes)
    known, comparisons = _agreed.get(plan, (None, DATA_COMPARISONS))
    if known == form and not comparisons:
        if fault is not None:
            raise fault
        return
    now = count_examples(shapes)
    if known is None or known[:2] != form[:2]:
        change = f"this process passed {now} examples whose arrays differ from before"
    elif known == form:
        change = f"the data of this process's first {DATA_COMPARISONS} batches are compared"
    elif (before := count_examples(known[2])) == now:
        change = f"the shapes of this process's arrays changed (it still gives {now} examples)"
    else:
        change = f"this process's number of examples changed from {before} to {now}"
    own = summarize_batch(batch, fault)
    texts = check_same_call(exchange_texts(f"batch\n{own}", plan, change, fault), "batch")
    if fault is not None:
        raise fault
    found = {rank: BatchSummary.read(text) for rank, text in texts.items()}
    for rank, x in found.items():
        if not x.valid:
            raise GShardError(f"process {rank} cannot place its batch: {x.text}")
    if len({x.form for x in found.values()}) > 1:
        given = _differing(exchange_texts(own.text, plan, change, full=True))
        raise GShardError(
            f"the processes gave batches of different arrays: {given}. Every process must give the "
            "same tree, with the same dtypes, shapes and scalars, and its own examples."
        )
    _compare_counts(found, positions)
    _compare_data(found, positions, comparisons > 0)
    has_data = all(x.has_data for x in found.values())
    _agreed[plan] = (form, 0 if has_data else max(0, comparisons - 1))


def compare_loaders(
    state: Mapping[str, int | None], example: Sequence[str], sample: int, plan: Plan
) -> None:
    """Compares the arguments, data and position of this process's loader with the others'.

    `sample` is a checksum of the first and the last example, or 0 if they change from read to read.
    """
    change = "this process starts a `for` loop over a DataLoader"
    description = "\n".join(example)
    facts = {"example": zlib.crc32(description.encode()), "sample": sample}
    own = json.dumps({**state, **facts})
    texts = check_same_call(exchange_texts(f"loader\n{own}", plan, change), "loader")
    found = {rank: json.loads(text) for rank, text in texts.items()}
    differing = [n for n in [*state, "example"] if len({x[n] for x in found.values()}) > 1]
    if "example" in differing:
        given = _differing(exchange_texts(description, plan, change, full=True))
        raise GShardError(
            f"the examples of the processes' DataLoaders differ: {given}. Give every process the "
            "same source and transform."
        )
    if differing:
        given = "; ".join(
            f"{name}: {by_value({rank: str(x[name]) for rank, x in found.items()})}"
            for name in differing
        )
        raise GShardError(
            f"the processes' DataLoaders differ in {given}. Each reads its own examples of one "
            "order: give all of them the same arguments and the full dataset (checksum is of its "
            "first and last example), of which the loader chooses each process's share, and load "
            "the same state on all (epoch, position)."
        )
    samples = {x["sample"] for x in found.values()}
    if len(samples) > 1 and 0 not in samples:
        warn(
            "the first or the last example of the dataset differs between the processes. "
            "DataLoader chooses by index which examples each process reads: give all of them the "
            "full dataset. With a part on each, examples are left out. (Ignore this where examples "
            "are drawn at random.)"
        )


def _differing(texts: Mapping[int, str]) -> str:
    """Formats the lines of each process's text that not all processes have."""
    lines = {rank: text.split("\n") for rank, text in texts.items()}
    common = set.intersection(*map(set, lines.values()))
    only = {rank: [x for x in own if x not in common] for rank, own in lines.items()}
    # The tree structure only helps if the arrays are the same.
    arrays = {rank: [x for x in own if not x.startswith("tree ")] for rank, own in only.items()}
    named = arrays if any(arrays.values()) else only
    return by_value({rank: some((x[:300] for x in own), 4) for rank, own in named.items()})


def _compare_counts(
    found: Mapping[int, BatchSummary], positions: Mapping[int, AbstractSet[int]]
) -> None:
    given = [(rank, x.examples, len(positions[rank])) for rank, x in found.items()]
    _, first_count, first_devices = given[0]
    if any(count * first_devices != first_count * devices for _, count, devices in given):
        texts = {r: f"{n} for {k} device{'s' * (k > 1)}" for r, n, k in given}
        raise UnevenInputsError(
            "every process must give the same number of examples for each of its devices, and gave "
            f"{by_value(texts)}. Drop the last, smaller batch of uneven data, or pad it with "
            "examples of weight 0 (gshard.Weighted). gshard.DataLoader splits the data evenly."
        )


def _compare_data(
    found: Mapping[int, BatchSummary], positions: Mapping[int, AbstractSet[int]], warns: bool
) -> None:
    """Refuses different data for the same indices, and with `warns` equal data for different."""
    groups: dict[frozenset[int], list[int]] = {}
    for rank in found:
        groups.setdefault(frozenset(positions[rank]), []).append(rank)
    for ranks in groups.values():
        if len({found[rank].data for rank in ranks}) > 1:
            raise GShardError(
                f"processes {some(ranks)} have devices for the same examples of the batch (the "
                "mesh has other axes too, such as one for tensor parallelism) but gave different "
                f"data. {_ADVICE_FOR_SHARED_INDICES}"
            )
    same: dict[int, list[int]] = {}
    for rank, x in found.items():
        if warns and x.has_data:
            same.setdefault(x.data, []).append(rank)
    separate = len(groups) == len(found) and len({len(p) for p in groups}) == 1
    everyone = len(found) == jax.process_count()
    advice = _ADVICE if separate and everyone else _ADVICE_FOR_SHARED_INDICES
    for ranks in same.values():
        if any(positions[r].isdisjoint(positions[ranks[0]]) for r in ranks):
            warn(
                f"processes {some(ranks)} gave the same data, judging by some bytes of every "
                f"example. {advice} Otherwise they probably all compute the same gradient."
            )


class BatchSummary(NamedTuple):
    """A summary of the batch of one process."""

    valid: bool  # whether the process can place its batch
    form: int  # checksum of `text`
    data: int  # checksum of some bytes of every example
    has_data: bool  # whether these bytes differ, unlike those of zeros
    examples: int  # how many
    text: str  # the arrays, one per line; or why the process cannot place them

    def __str__(self) -> str:
        *numbers, text = self
        return f"{' '.join(str(int(x)) for x in numbers)}\n{text}"

    @classmethod
    def read(cls, summary: str) -> BatchSummary:
        """Parses `str(summary)`, whose text may have been cut."""
        numbers, _, text = summary.partition("\n")
        valid, form, data, has_data, count = map(int, numbers.split())
        return cls(bool(valid), form, data, bool(has_data), count, text)


def summarize_batch(batch: Any, fault: GShardError | None) -> BatchSummary:
    """Summarizes this process's batch, or its fault."""
    paths, leaves, structure = flatten(batch)
    count = count_examples([getattr(x, "shape", ()) for x in leaves])
    if fault is not None:
        return BatchSummary(False, 0, 0, False, count, str(fault))
    lines = []
    for path, x in zip(paths, leaves, strict=True):
        shape = list(map(str, getattr(x, "shape", ())))
        if shape and shape[0] == str(count):
            shape[0] = "examples"
        value = "" if shape else f" = {x}"
        dtype = getattr(x, "dtype", type(x).__name__)
        lines.append(f"{path or 'batch'} {dtype}[{', '.join(shape)}]{value}")
    text = "\n".join([*lines, describe_structure(structure)])
    return BatchSummary(True, zlib.crc32(text.encode()), *_checksum(leaves), count, text)


def describe_structure(structure: Any) -> str:
    """Describes a tree structure by a text that is the same in every process."""
    return "tree " + re.sub(r" at 0x[0-9a-f]+", "", str(structure)).removeprefix("PyTreeDef")


def count_examples(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of examples of the first array, or 0 if there are only scalars."""
    return next((shape[0] for shape in shapes if shape), 0)


def _checksum(leaves: Sequence[Any]) -> tuple[int, bool]:
    """Returns a checksum of this process's arrays, and whether their entries differ."""
    total, has_data = 0, False
    for x in leaves:
        if not np.ndim(x) or not np.size(x):
            continue
        entries = np.asarray(x).reshape(len(x), -1)
        # Bytes of every example, since the first ones may be a header or padding.
        stride = -(-entries.nbytes // CHECKSUM_BYTES)
        selected = np.ascontiguousarray(entries[:, ::stride]).reshape(-1)
        as_bytes = selected.view(np.uint8).reshape(selected.size, -1)  # so NaN equals itself
        has_data |= bool((as_bytes != as_bytes[:1]).any())
        total = zlib.crc32(as_bytes.tobytes(), total)
    return total, has_data
