"""Buckets against leaf by leaf: where packing pays, by size and number of leaves.

    python -m benchmarks.collectives [--devices 8] [--processes 2] [--json FILE]

A ratio below 1 says that packing is faster. All leaves of a cell are of one size; a bucket holds as
many as `gshard.train.comm.buckets.MAX_LEAVES`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import gshard
from benchmarks.machine import write_cells
from benchmarks.processes import in_processes, is_first
from benchmarks.timing import Ratio, in_turn, ratio
from gshard.sharding.group import data_group
from gshard.sharding.layout import Layout
from gshard.train.comm.collectives import all_gather_updated, reduce_leaves, scatter_leaves

KINDS = ("reduce-scatter", "all-gather", "all-reduce")
EVERYTHING = 2**40  # elements of a bucket that is never full


class Line(NamedTuple):
    """One cell: elements of a leaf, leaves, milliseconds leaf by leaf, packed to leaf by leaf."""

    kind: str
    elements: int
    leaves: int
    alone_ms: float
    packed: Ratio


def cell(kind: str, elements: int, leaves: int, mesh: Any, rounds: int) -> Line:
    """The same leaves through one kind of collective, alone and packed."""
    group = data_group(mesh)
    columns = elements // (8 * group.size)
    shape = (8 * group.size, columns)
    layout = Layout("leaf", shape, jnp.dtype(jnp.float32), 0, group, None, "")
    layouts, axes = [layout] * leaves, group.axes
    replicated, sharded = jax.P(), jax.P(axes)
    specs = {
        "reduce-scatter": (replicated, sharded),
        "all-gather": (sharded, replicated),
        "all-reduce": (replicated, replicated),
    }[kind]

    def run(bucket_size: int) -> Callable[[], None]:
        def on_device(xs: list[jax.Array]) -> list[jax.Array]:
            if kind == "all-reduce":
                return reduce_leaves(xs, axes, bucket_size)
            move = scatter_leaves if kind == "reduce-scatter" else all_gather_updated
            return move(xs, layouts, bucket_size)

        moved = jax.jit(
            jax.shard_map(
                on_device, mesh=mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False
            )
        )

        def make() -> list[jax.Array]:
            return [jnp.full(shape, i, jnp.float32) for i in range(leaves)]

        given = jax.jit(make, out_shardings=jax.NamedSharding(mesh, specs[0]))()

        def one() -> None:
            jax.block_until_ready(moved(given))

        return one

    seconds = in_turn({"alone": run(0), "packed": run(EVERYTHING)}, rounds)
    alone = sorted(seconds["alone"])[rounds // 2]
    packed = ratio(seconds["packed"], seconds["alone"])
    return Line(kind, elements, leaves, 1000 * alone, packed)


def cells(args: argparse.Namespace) -> Iterator[Line]:
    """Every cell that was asked for."""
    mesh = gshard.make_mesh()
    for kind in args.kinds:
        for elements in args.elements:
            for leaves in args.leaves:
                yield cell(kind, elements, leaves, mesh, args.rounds)


def main() -> None:
    """Runs the benchmark, prints its table and writes its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices in all")
    parser.add_argument("--processes", type=int, default=1, help="more than one: over gloo")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--elements", nargs="+", type=int, default=[2**i for i in range(10, 21, 2)])
    parser.add_argument("--leaves", nargs="+", type=int, default=[8, 50])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    if not in_processes("benchmarks.collectives", args.processes, args.devices):
        return
    lines = list(cells(args))
    if not is_first():
        return
    place = f"{args.devices} devices, {args.processes} processes, {os.cpu_count()} cores"
    table = Table(title=f"jax {jax.__version__}, {place}")
    for head in ("collective", "KiB", "leaves", "ms alone", "packed to alone"):
        table.add_column(head, justify="left" if head == "collective" else "right")
    for line in lines:
        cost = f"{line.alone_ms:.2f}", str(line.packed)
        table.add_row(line.kind, str(line.elements * 4 // 1024), str(line.leaves), *cost)
    Console(width=100).print(table)
    if args.json:
        write_cells(args.json, lines, {"place": place})


if __name__ == "__main__":
    main()
