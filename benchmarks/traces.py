"""Time of collectives in a trace of `jax.profiler`, and how much of it computation overlaps."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

_KERNEL = re.compile(r"[nr]ccl", re.IGNORECASE)  # of NCCL and RCCL
# These contain operations that are listed on their own.
_AROUND = re.compile(r"(while|call|conditional)([.\-_]|$)")
Spans = list[tuple[float, float]]


class Overlap(NamedTuple):
    """Seconds of a device in collectives, of these while it also computed, and in computation.

    Attributes:
      devices: over which the seconds are averaged.
    """

    devices: int
    collective: float
    overlapped: float
    compute: float

    @property
    def share(self) -> float | None:
        """The overlapped share of the time of collectives; None without collectives."""
        return self.overlapped / self.collective if self.collective else None


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """The events of the one trace that `jax.profiler.trace(folder)` has written.

    Raises:
      FileNotFoundError: there is none.
    """
    found = sorted(folder.rglob("*.trace.json.gz"))
    if not found:
        raise FileNotFoundError(f"jax.profiler has written no *.trace.json.gz below {folder}")
    with gzip.open(found[-1]) as file:
        return json.load(file)["traceEvents"]


def overlap_of(events: Iterable[dict[str, Any]], collectives: Collection[str]) -> Overlap:
    """The overlap, from the events of a trace and the names of a program's collectives.

    A GPU is a process `/device:GPU:0` of the trace, with a thread for each of its streams; a TPU
    has threads `XLA Ops` and `Async XLA Ops`. Other threads there repeat these events by module,
    step and scope. Virtual CPU devices share threads, and their events name the device.
    """
    spans: dict[Any, tuple[Spans, Spans]] = defaultdict(lambda: ([], []))
    names, complete = {}, []
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = event["tid"] if event["name"] == "thread_name" else None
            names[event["pid"], thread] = event["args"]["name"]
        elif event.get("ph") == "X":
            complete.append(event)
    for event in complete:
        args, name = event.get("args", {}), event["name"]
        process = names.get((event["pid"], None), "")
        thread = names.get((event["pid"], event["tid"]), "")
        if process.startswith("/device:"):
            device = process if thread.startswith("Stream") or "XLA Ops" in thread else None
        else:
            device = args.get("device_ordinal") if "hlo_op" in args else None
        if device is None or _AROUND.match(name):
            continue
        is_collective = args.get("hlo_op", name) in collectives or _KERNEL.search(name)
        start = event["ts"] / 1e6
        spans[device][0 if is_collective else 1].append((start, start + event.get("dur", 0) / 1e6))
    count = max(1, len(spans))
    merged = [(_union(a), _union(b)) for a, b in spans.values()]
    return Overlap(
        len(spans),
        sum(_length(a) for a, _ in merged) / count,
        sum(_length(_both(a, b)) for a, b in merged) / count,
        sum(_length(b) for _, b in merged) / count,
    )


def _union(spans: Spans) -> Spans:
    """Spans that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _both(a: Spans, b: Spans) -> Spans:
    """What is in both of two unions."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
