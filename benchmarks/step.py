"""Step time and temporary memory of every level, against GSPMD and against one device.

    python -m benchmarks.step [--models mlp gpt gpt-scan] [--devices 4 8] [--examples 1 16]
        [--processes 1 2 4] [--json FILE]

Machines are noisy, so nothing is timed alone: the programs of a cell run in turn in one process,
and what is reported is the median of the rounds' ratios with its 95 % bounds. `one device` runs the
same total batch by plain `jit` on the same cores; GSPMD is `benchmarks.gspmd`, at `p_g_os` the
variant that is faster in the cell at hand. With `--processes 2` the devices are those of two
processes that talk over gloo, and gshard is compared with itself in one process instead.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.groups import ProcessGroup
from benchmarks.gspmd import LEVELS
from benchmarks.machine import write_cells
from benchmarks.models import PROBLEMS
from benchmarks.processes import mesh_of, on_cpu
from benchmarks.programs import by_gshard, by_gspmd, on_one_device
from benchmarks.timing import Ratio, in_turn, ratio

ONE = "one device"


class Line(NamedTuple):
    """One level in one cell; times in seconds, temporaries in bytes.

    `to_one`: to one device, or of several processes to one process.
    """

    model: str
    processes: int
    devices: int
    examples: int
    level: str
    seconds: float
    to_gspmd: Ratio
    to_dp: Ratio
    to_one: Ratio
    temporary: int
    temporary_gspmd: int


def cell(
    name: str, devices: int, examples: int, rounds: int, levels: tuple[str, ...] = LEVELS
) -> Iterator[Line]:
    """All levels of one model on one mesh with one batch size."""
    problem, total = PROBLEMS[name](), devices * examples
    mesh = mesh_of(devices)
    programs = {ONE: on_one_device(problem, total)}
    for level in dict.fromkeys(("dp", *levels)):
        programs[level] = by_gshard(problem, total, level, mesh)
    for level in levels:
        for gathered in _variants(level):
            programs[f"gspmd {level} {gathered}"] = by_gspmd(problem, total, level, mesh, gathered)
    seconds = in_turn({name: program.run for name, program in programs.items()}, rounds)
    temporary = {name: program.temporary for name, program in programs.items()}
    for level in levels:
        yield _line((name, 1, devices, examples, level), seconds, temporary)


def cell_over_processes(
    name: str, processes: int, devices: int, examples: int, rounds: int, levels: tuple[str, ...]
) -> Iterator[Line]:
    """The same cell, every program in processes of its own; level by level, for memory's sake."""
    for level in levels:
        wanted = {level: ("gshard", level, processes), ONE: ("gshard", level, 1)}
        wanted.setdefault("dp", ("gshard", "dp", processes))
        for gathered in _variants(level):
            program = "gspmd, gathered" if gathered else "gspmd"
            wanted[f"gspmd {level} {gathered}"] = (program, level, processes)
        groups = {}
        try:
            for key, (program, at, size) in wanted.items():
                args = [program, name, at, str(devices), str(examples)]
                groups[key] = ProcessGroup("benchmarks.step_process", args, size)
            seconds = in_turn({key: group.step for key, group in groups.items()}, rounds)
            temporary = {key: max(group.end()) for key, group in groups.items()}
        finally:
            for group in groups.values():
                group.stop()
        yield _line((name, processes, devices, examples, level), seconds, temporary)


def _variants(level: str) -> tuple[bool, ...]:
    """Of the baseline: whether weights are also constrained to be replicated at their use."""
    return (False, True) if level == "p_g_os" else (False,)


def _line(
    at: tuple[str, int, int, int, str], seconds: dict[str, list[float]], temporary: dict[str, int]
) -> Line:
    level = at[-1]
    variants = [name for name in seconds if name.startswith(f"gspmd {level} ")]
    best = min(variants, key=lambda name: statistics.median(seconds[name]))
    return Line(
        *at,
        statistics.median(seconds[level]),
        ratio(seconds[level], seconds[best]),
        ratio(seconds[level], seconds["dp"]),
        ratio(seconds[level], seconds[ONE]),
        temporary[level],
        temporary[best],
    )


def table(lines: list[Line]) -> Table:
    """What a person looks at."""
    processes = lines[0].processes
    one = "one device" if processes == 1 else "one process"
    place = f"{processes} process{'es' if processes > 1 else ''}, {os.cpu_count()} cores"
    found = Table(title=f"jax {jax.__version__}, virtual CPU devices, {place}")
    heads = ("model", "devices", "examples", "level", "ms", "to GSPMD", "to dp", f"to {one}")
    for head in (*heads, "temp MiB", "GSPMD's"):
        found.add_column(head, justify="left" if head in ("model", "level") else "right")
    for line in lines:
        found.add_row(
            line.model,
            str(line.devices),
            str(line.examples),
            line.level,
            f"{1000 * line.seconds:.1f}",
            *(str(r) for r in (line.to_gspmd, line.to_dp, line.to_one)),
            *(f"{b / 2**20:.2f}" for b in (line.temporary, line.temporary_gspmd)),
        )
    return found


def medians(lines: list[Line]) -> dict[str, dict[str, float]]:
    """Per level, over all cells: of the time ratios and of the temporary memory."""
    found = {}
    for level in dict.fromkeys(line.level for line in lines):
        own = [line for line in lines if line.level == level]
        found[level] = {
            "to_gspmd": statistics.median(line.to_gspmd.median for line in own),
            "to_dp": statistics.median(line.to_dp.median for line in own),
            "to_one": statistics.median(line.to_one.median for line in own),
            "temporary": statistics.median(line.temporary / line.temporary_gspmd for line in own),
        }
    return found


def main() -> None:
    """Runs the benchmark, prints its table and writes its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8], help="virtual devices")
    parser.add_argument(
        "--examples", nargs="+", type=int, default=[1, 16], help="examples per device"
    )
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="1, 2, 4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    for devices, processes in itertools.product(args.devices, args.processes):
        if processes < 1 or devices % processes:
            raise SystemExit(f"{devices} devices do not divide over {processes} processes.")
    on_cpu(max(args.devices))
    console, lines, levels = Console(width=150), [], tuple(args.levels)
    cells = itertools.product(args.processes, args.models, args.devices, args.examples)
    for processes, model, devices, examples in cells:
        many = f"{processes} processes, " if processes > 1 else ""
        with console.status(f"{model}, {many}{devices} devices, {examples} examples each"):
            if processes == 1:
                found = list(cell(model, devices, examples, args.rounds, levels))
            else:
                given = (model, processes, devices, examples, args.rounds, levels)
                found = list(cell_over_processes(*given))
        console.print(table(found))
        lines += found
    for processes in args.processes:
        own = [line for line in lines if line.processes == processes]
        if len(own) > len(levels):
            console.print(f"medians over all cells, {processes} processes:", medians(own))
    if args.json:
        write_cells(args.json, lines, {"cores": os.cpu_count()}, rounds=args.rounds)


if __name__ == "__main__":
    main()
