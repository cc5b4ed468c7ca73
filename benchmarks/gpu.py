"""Step time and memory on one GPU: every level against plain `jit`.

    python -m benchmarks.gpu [--models mlp gpt gpt-scan] [--examples 64] [--json FILE]

On one device no level shards anything, so whatever a step takes above plain `jit` is what gshard
costs: the guard, the norm, and its Python. Ratios are paired, as in `benchmarks.step`. Memory is
the temporary one that the compiler wants. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

import gshard
from benchmarks.machine import write_cells
from benchmarks.models import PROBLEMS, gpt, mlp
from benchmarks.programs import by_gshard, on_one_device
from benchmarks.timing import Ratio, in_turn, ratio

# Large enough that a GPU is busy.
SIZED = {
    "mlp": partial(mlp, width=2048, layers=8),
    "gpt": partial(gpt, width=1024, layers=8, length=512),
    "gpt-scan": partial(gpt, width=1024, layers=8, length=512, scan=True),
}
LEVELS = ("dp", "p_g_os")
JIT = "jit"


class Line(NamedTuple):
    """One program: seconds of a step, ratio to plain `jit`, bytes of temporary memory."""

    model: str
    program: str
    seconds: float
    to_jit: Ratio
    temporary: int


def cell(name: str, examples: int, rounds: int) -> Iterator[Line]:
    """Plain `jit` and gshard, in turn."""
    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    programs = {JIT: on_one_device(SIZED[name](), examples)}
    for level in LEVELS:
        programs[level] = by_gshard(SIZED[name](), examples, level, mesh)
    seconds = in_turn({key: program.run for key, program in programs.items()}, rounds)
    for key, program in programs.items():
        found = ratio(seconds[key], seconds[JIT])
        yield Line(name, key, median(seconds[key]), found, program.temporary)


def main() -> None:
    """Runs the benchmark, prints its table and writes its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"gpu: skipped, JAX finds no GPU here, but {jax.devices()[0].platform}.")
        return
    table = Table(title=f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for head in ("model", "program", "ms", "to jit", "temp MiB"):
        table.add_column(head, justify="left" if head in ("model", "program") else "right")
    lines = [line for name in args.models for line in cell(name, args.examples, args.rounds)]
    for line in lines:
        cost = f"{1000 * line.seconds:.2f}", str(line.to_jit), f"{line.temporary / 2**20:.1f}"
        table.add_row(line.model, line.program, *cost)
    Console(width=100).print(table)
    if args.json:
        write_cells(args.json, lines, {"device": jax.devices()[0].device_kind})


if __name__ == "__main__":
    main()
