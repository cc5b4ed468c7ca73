"""Rows of the GPU check (`benchmarks.gpu_sections`), and what should not be so in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_ranks import RANKS, Case, cases
from gshard.cli.doctor.devices import reason_in
from gshard.cli.doctor.machine import one_line

Found = dict[str, Any]
_ROW = 120.0  # seconds of a row that has processes of its own, at most


@contextmanager
def tried(rows: list[Found], **about: str) -> Iterator[None]:
    """If the body fails, adds a row: what it was about, and its error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):  # of a `ProcessGroup`, with its output
            first, *output = said.splitlines()
            said = f"{first} {reason_in(said) or ''.join(output[-1:])}"
        rows.append({**about, "error": one_line(said)})


def row_seconds(until: float) -> float:
    """The time of the next row, until a little before the section is ended."""
    left = min(_ROW, until - time.time() - 5)
    if left <= 0:
        raise TimeoutError("left out: earlier rows took all the time")
    return left


def done(rows: list[Found]) -> list[Found]:
    """The rows without an error."""
    return [row for row in rows if "error" not in row]


def failed(rows: list[Found], *more: str | None) -> str | None:
    """The errors of rows, and what else should not be so."""
    errors = [row for row in rows if "error" in row]
    said = [f"{' '.join([*row.values()][:-1])}: {row['error']}" for row in errors]
    return "; ".join([*said, *filter(None, more)]) or None


def unlike_jit(rows: list[Found]) -> str | None:
    """The rows that failed, are too far from plain `jit`, or differ between processes."""
    known, wrong = cases(RANKS), []
    for row in done(rows):
        case = known.get(row.get("case", ""), Case({}, "", {}))
        near = row["loss_off"] <= case.loss_off and row["params_off"] <= case.params_off
        if not near or row.get("between_ranks", 0) != 0:
            wrong.append(row.get("case") or f"{row['model']} at {row['level']}")
    return failed(rows, f"not those of plain jit: {', '.join(wrong)}" if wrong else None)


def not_offloaded(rows: list[Found]) -> str | None:
    """Says if the state that is to be in host memory is not."""
    found = []
    for row in done(rows):
        wanted = row["optimizer state"]
        if ("pinned_host" in row["stored"]) != (wanted == "host"):
            found.append(f"state for the {wanted}: {row['stored']}")
    return "; ".join(found) or None


def not_traced(rows: list[Found], devices: int) -> str | None:
    """What is missing in traces of so many devices."""
    found = []
    for row in done(rows):
        lost = [] if row["devices"] == devices else [f"{row['devices']} of {devices} devices"]
        lost += [] if row["compute_seconds"] else ["no computation"]
        lost += [] if devices == 1 or row["collective_seconds"] else ["no collectives"]
        found += [f"the trace of {row['level']} has {' and '.join(lost)}"] if lost else []
    return "; ".join(found) or None


def untrained(rows: list[Found]) -> str | None:
    """The rows whose loss did not fall, or that skipped steps."""
    wrong = []
    for row in done(rows):
        name = row.get("optimizer state") or f"{row['model']} in {row['dtype']}"
        wrong += [] if row["last_loss"] < row["first_loss"] else [f"{name}: the loss does not fall"]
        wrong += [f"{name}: {row['skipped']} steps skipped"] if row["skipped"] else []
    return "; ".join(wrong) or None
