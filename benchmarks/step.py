"""Step time and temporary memory of every level, against GSPMD and against one device.

    python -m benchmarks.step [--models mlp gpt gpt-scan] [--devices 4 8] [--rows 1 16] [--json F]

Machines are noisy, so nothing is timed alone: the programs of a cell run in turn in one process,
and what is reported is the median of the rounds' ratios with its 95 % bounds. `one device` runs the
same total batch by plain `jit` on the same cores; GSPMD is `benchmarks.gspmd`, at `p_g_os` the
variant that is faster in the cell at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.table import Table

import gshard
from benchmarks.gspmd import LEVELS, baseline
from benchmarks.machine import versions
from benchmarks.models import PROBLEMS, Problem
from benchmarks.timing import Ratio, in_turn, ratio

ONE = "one device"


class Program(NamedTuple):
    """One compiled step: runs one, and the bytes of temporary memory that its compiler wants."""

    run: Callable[[], None]
    temporary: int


def on_one_device(problem: Problem, rows: int) -> Program:
    """Plain `jit`, the whole batch on one device."""
    tx = optax.adamw(1e-3)

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params, batch = jax.device_put((_copy(problem.params), problem.batch(rows)), place)
    opt_state = jax.jit(tx.init)(params)
    return _program(jax.jit(step, donate_argnums=(0, 1)), params, opt_state, batch)


def by_gspmd(problem: Problem, rows: int, level: str, mesh: Any, whole_weights: bool) -> Program:
    """The frozen baseline."""
    made = baseline(
        problem.loss_fn,
        optax.adamw(1e-3),
        problem.params,
        mesh,
        level,
        stacks=problem.stacks,
        whole_weights=whole_weights,
    )
    of_params, _, of_batch = made.shardings
    params = jax.tree.map(jax.device_put, _copy(problem.params), of_params)
    batch = jax.device_put(problem.batch(rows), of_batch)
    return _program(made.step, params, made.init(params), batch)


def by_gshard(problem: Problem, rows: int, level: str, mesh: Any) -> Program:
    """`make_train_step`, with all that it does by default."""
    params, tx = problem.params, optax.adamw(1e-3)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    scan_axes = {f"{stack}/": 0 for stack in problem.stacks} or None
    state, plan = gshard.shard_train_state(state, mesh, level, scan_axes=scan_axes)
    step = gshard.make_train_step(problem.loss_fn, plan)
    batch = gshard.shard_batch(problem.batch(rows), plan)
    temporary = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, state.opt_state, metrics))

    return Program(run, temporary)


def _program(step: Any, params: Any, opt_state: Any, batch: Any) -> Program:
    temporary = step.lower(params, opt_state, batch).compile().memory_analysis().temp_size_in_bytes

    def run() -> None:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready((params, opt_state, loss))

    return Program(run, temporary)


def _copy(tree: Any) -> Any:
    return jax.tree.map(np.copy, tree)


class Line(NamedTuple):
    """One level in one cell; times in seconds, temporaries in bytes."""

    model: str
    devices: int
    rows: int
    level: str
    seconds: float
    to_gspmd: Ratio
    to_dp: Ratio
    to_one: Ratio
    temporary: int
    temporary_gspmd: int


def cell(
    name: str, devices: int, rows: int, rounds: int, levels: tuple[str, ...] = LEVELS
) -> Iterator[Line]:
    """All levels of one model on one mesh with one batch size."""
    problem, total = PROBLEMS[name](), devices * rows
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    programs = {ONE: on_one_device(problem, total)}
    for level in dict.fromkeys(("dp", *levels)):
        programs[level] = by_gshard(problem, total, level, mesh)
    for level in levels:
        for whole in (False, True) if level == "p_g_os" else (False,):
            programs[f"gspmd {level} {whole}"] = by_gspmd(problem, total, level, mesh, whole)
    seconds = in_turn({name: program.run for name, program in programs.items()}, rounds)
    for level in levels:
        variants = [name for name in programs if name.startswith(f"gspmd {level} ")]
        best = min(variants, key=lambda name: statistics.median(seconds[name]))
        yield Line(
            name,
            devices,
            rows,
            level,
            statistics.median(seconds[level]),
            ratio(seconds[level], seconds[best]),
            ratio(seconds[level], seconds["dp"]),
            ratio(seconds[level], seconds[ONE]),
            programs[level].temporary,
            min(programs[name].temporary for name in variants),
        )


def table(lines: list[Line]) -> Table:
    """What a person looks at."""
    found = Table(title=f"jax {jax.__version__}, virtual CPU devices on {os.cpu_count()} cores")
    heads = ("model", "devices", "rows", "level", "ms", "to GSPMD", "to dp", "to one device")
    for head in (*heads, "temp MiB", "GSPMD's"):
        found.add_column(head, justify="left" if head in ("model", "level") else "right")
    for line in lines:
        found.add_row(
            line.model,
            str(line.devices),
            str(line.rows),
            line.level,
            f"{1000 * line.seconds:.1f}",
            *(str(r) for r in (line.to_gspmd, line.to_dp, line.to_one)),
            *(f"{b / 2**20:.2f}" for b in (line.temporary, line.temporary_gspmd)),
            end_section=line.level == LEVELS[-1],
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
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16], help="rows per device")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    gshard.virtual_devices(max(args.devices))
    console, lines = Console(width=120), []
    for model in args.models:
        for devices in args.devices:
            for rows in args.rows:
                with console.status(f"{model}, {devices} devices, {rows} rows each"):
                    lines += cell(model, devices, rows, args.rounds, tuple(args.levels))
                console.print(table(lines[-len(args.levels) :]))
    if len(lines) > len(args.levels):
        console.print("medians over all cells", medians(lines))
    if args.json:
        about = {"cores": os.cpu_count(), **versions()}
        rows = [line._asdict() for line in lines]
        report = {"machine": about, "rounds": args.rounds, "cells": rows, "medians": medians(lines)}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
