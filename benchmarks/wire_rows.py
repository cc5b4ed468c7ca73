"""Bytes, peak and overlap of the steps in the documents' table, next to those of an earlier run.

    python -m benchmarks.wire_rows [--only h100]           # exits with 1 if a figure is worse
    python -m benchmarks.wire_rows [--only h100] --record  # keeps what is found now

Run before a release, and after changes in `gshard/train/`: a change of a few bytes in each layer is
not seen in a test of a small model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.llama import Sizes
from benchmarks.wire import compiled, total
from gshard._util.errors import GShardError
from gshard.analysis.aot.target import parse_target

ROWS = Path(__file__).with_name("wire_rows.json")
LOSS = 0.01  # that a check fails for
# What a row keeps, and whether more of it is better.
AMOUNTS = {"sent": False, "between nodes": False, "overlapped": True, "peak": False}
# Platforms, and how the names of packages begin that only their compiler uses.
_COMPILERS = ("gpu", "jax-cuda"), ("gpu", "nvidia-"), ("tpu", "libtpu")


def amounts_of(program: dict[str, Any]) -> dict[str, int]:
    """Bytes of one device that a row keeps, of a program that `benchmarks.wire` has compiled."""
    return {
        "sent": total(program),
        "between nodes": sum(program["network_bytes"].values()),
        "overlapped": sum(program["asynchronous_bytes"].values()),
        "peak": program["memory_bytes"]["peak_memory"],
    }


def losses(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """The amounts that are worse by more than `LOSS`."""
    return [
        name
        for name, more_is_better in AMOUNTS.items()
        if (before[name] - now[name] if more_is_better else now[name] - before[name])
        > LOSS * before[name]
    ]


def _others(versions: dict[str, str], platform: str) -> dict[str, str]:
    """Versions that change a program for a platform without a change of gshard."""
    unused = ("gshard", "python", *(x for of, x in _COMPILERS if of != platform))
    return {name: x for name, x in versions.items() if not name.startswith(unused)}


def compare(file: Path, only: str, record: bool, timeout: float) -> bool:
    """Compiles each row of a file and prints both figures; whether none is worse.

    With `record` the file keeps what is found. Figures of other versions are printed and do not
    count: compilers change them.

    Raises:
      GShardError: a step does not compile, the file has no such row, or no figure counts.
    """
    rows = json.loads(file.read_text())
    chosen = [row for row in rows if only in f"{row['target']} {row['level']}"]
    if not chosen:
        have = ", ".join(f"{row['target']} {row['level']}" for row in rows)
        raise GShardError(f"no row of {file} has {only!r} in its name. It has: {have}.")
    table, worse, counted = Table(title="GB per device and step", title_justify="left"), False, 0
    for column in ("target, level", "", *AMOUNTS):
        table.add_column(column, justify="right" if column in AMOUNTS else "left")
    try:
        for row in chosen:
            target, sizes = parse_target(row["target"]), Sizes(**row["sizes"])
            with tempfile.TemporaryDirectory() as folder:
                dump = Path(folder, "gshard.txt")
                found = compiled("gshard", target, row["level"], sizes, dump, timeout)
            if "error" in found:
                raise GShardError(found["error"])
            now, before = amounts_of(found), row.get("bytes")
            name = f"{row['target']}, {row['level']}"
            if before is None:
                name = f"{name}: not compared, no figures"
            else:
                lost = losses(before, now)
                known, here = (_others(x["versions"], target.platform) for x in (row, found))
                worse |= known == here and bool(lost)
                counted += known == here
                table.add_row(name, "before", *(f"{before[x] / 1e9:.3f}" for x in AMOUNTS))
                name = f"worse: {', '.join(lost)}" if lost else "as before"
                name += "" if known == here else " (not compared, other versions)"
            table.add_row(name, "now", *(f"{now[x] / 1e9:.3f}" for x in AMOUNTS), end_section=True)
            if record:
                row |= {"versions": found["versions"], "bytes": now}
                file.write_text(json.dumps(rows, indent=1) + "\n")
    finally:  # rows before one that does not compile
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    if not counted and not record:
        raise GShardError("nothing was compared. --record keeps these figures for the next time.")
    return not worse


def main() -> None:
    """Compares or records."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire_rows",
        description="Compares bytes and peaks with those of an earlier run.",
    )
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    parser.add_argument("--record", action="store_true", help="keep what is found")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one program")
    args = parser.parse_args()
    try:
        good = compare(args.rows, args.only, args.record, args.timeout)
    except GShardError as error:
        raise SystemExit(f"wire_rows: {error}") from None
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
