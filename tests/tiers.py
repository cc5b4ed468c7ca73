"""What the quick tier takes, how many workers run it, and the shards of a full run.

A test is slow if it is marked so, if `quick` leaves its case out, or if `slow_cases.txt` lists it:
cases that took more than a quarter of a second, of tests whose other cases are quick, or that quick
tests stand in for. `scripts/mutate.py` shows that the quick tier still notices every fault, except
those whose tests are all slow.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from gshard._util import cgroup

SLOW_CASES = Path(__file__).with_name("slow_cases.txt")
WORKER_BYTES = 1.5e9  # a worker stays below
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of a period, in version 2


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """The whole table for `parametrize`, in its order; what is not among those chosen is slow."""
    table = list(cases)
    unknown = [case for case in chosen if case not in table]
    if unknown:
        raise ValueError(f"not in the table: {unknown}")
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in table
    ]


@functools.cache
def slow_cases() -> frozenset[str]:
    """The node ids in `slow_cases.txt`; one without brackets stands for all cases of a test."""
    lines = SLOW_CASES.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def is_slow_case(node_id: str) -> bool:
    """Whether `slow_cases.txt` lists a test."""
    return node_id in slow_cases() or node_id.partition("[")[0] in slow_cases()


def workers() -> int:
    """One for each core and one that runs while others wait for processes, if memory allows.

    Of a container, what it may use of both.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = cgroup.contents(CPU_QUOTA).partition(" ")
    if quota.isdigit():  # else "max"
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, min(cores + 1, int(free_memory() / WORKER_BYTES)))


def free_memory() -> int:
    """Bytes of memory, of a container what it may use."""
    memory = psutil.virtual_memory().available
    return min(memory, cgroup.memory_limit() or memory)


def too_many(asked: int) -> list[str]:
    """A warning, if so many workers may need more memory than there is."""
    need, has = asked * WORKER_BYTES, free_memory()
    if asked < 2 or need <= has:
        return []
    return [
        f"warning: {asked} workers (JOBS= or -n) may need {need / 1e9:.1f} GB of memory, and "
        f"{has / 1e9:.1f} GB are available. Use fewer, or close other programs."
    ]


def parse_shard(text: str) -> tuple[int, int]:
    """Reads `2/4`, the second of four shards."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise pytest.UsageError(
            f"SHARD={text} is no shard of a test run. Write SHARD=1/4 for the first of four."
        )
    return int(found[1]), int(found[2])


def is_in_shard(file: str, shard: tuple[int, int]) -> bool:
    """Whether a shard has a file, whatever other files there are and however long they take."""
    number, count = shard
    # The best of 3,000 numbers: the tests of four shards, without fixtures, took equally long.
    return int(hashlib.md5(f"{file} 1935".encode()).hexdigest(), 16) % count == number - 1


def stale(listed: Collection[str], node_ids: Sequence[str]) -> list[str]:
    """What is listed and names no test of those collected, for the files that were collected."""
    files = {node_id.partition("::")[0] for node_id in node_ids}
    known = {*node_ids, *(node_id.partition("[")[0] for node_id in node_ids)}
    return sorted(x for x in listed if x.partition("::")[0] in files and x not in known)
