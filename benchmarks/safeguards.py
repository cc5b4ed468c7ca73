"""What a step's safeguards cost: the step as users call it, and its compiled program alone.

    python -m benchmarks.safeguards [--processes 1 2] [--levels os p_g_os] [--examples 4]

With them: numbered batches of a `DataLoader`, comparison of programs and batches, checks of the
arguments, a watchdog, a status file as `gshard launch` has it, and at `os` a comparison of replicas
every 100 steps. Without: the same stages compiled without batch numbers, called directly. Both are
processes of their own that run ten steps each in turn. A step's time differs by up to a fifth from
process to process, so each ratio comes from a new pair of processes, and the bounds include this
spread.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax

import gshard
from benchmarks.groups import ADDRESS, ProcessGroup, rank, serve, size
from benchmarks.models import PROBLEMS
from benchmarks.processes import on_cpu
from benchmarks.timing import in_turn, ratio

STEPS = 10  # for each command


def program(args: argparse.Namespace, level: str, guarded: bool) -> Callable[[], float]:
    """A function that runs `STEPS` steps and returns the last loss."""
    devices = args.devices
    on_cpu(devices // size())
    if size() > 1:
        own = {} if guarded else {"hang_timeout": 0}
        gshard.distributed.initialize(os.environ[ADDRESS], size(), rank(), **own)
    problem = PROBLEMS[args.model]()
    pair = (problem.params, optax.adamw(1e-3))
    scan_axes = {f"{stack}/": 0 for stack in problem.stacks} or None
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), level, scan_axes=scan_axes)
    replicas = 100 if guarded and level in ("dp", "os") else None
    step = gshard.make_train_step(problem.loss_fn, plan, check_replicas=replicas)
    total = args.examples * devices
    data = problem.batch(STEPS * total)
    loader = gshard.DataLoader(data, total, plan, shuffle=False)
    batches: Iterator[Any] = itertools.cycle(list(loader))
    leaves, structure = jax.tree.flatten(plan.kind.split(state))

    def with_safeguards() -> float:
        nonlocal state
        for batch in itertools.islice(batches, STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready(state.params)
        return float(metrics["loss"])

    def without() -> float:
        nonlocal leaves
        for batch in itertools.islice(batches, STEPS):
            leaves, metrics, *_ = step.jitted(leaves, structure, batch, None, None)
        jax.block_until_ready(leaves)
        return float(metrics["loss"])

    return with_safeguards if guarded else without


def pair(args: argparse.Namespace, processes: int, level: str) -> tuple[float, float]:
    """Median seconds of ten steps with safeguards and without, in two new groups of processes."""
    with tempfile.TemporaryDirectory() as folder:
        groups = {}
        try:
            for name in ("with", "without"):
                given = ["--serve", name, "--levels", level, "--status", f"{folder}/status"]
                given += ["--model", args.model, "--devices", str(args.devices)]
                given += ["--examples", str(args.examples)]
                groups[name] = ProcessGroup("benchmarks.safeguards", given, processes)
            seconds = in_turn({name: group.step for name, group in groups.items()}, args.rounds)
            for group in groups.values():
                group.end()
        finally:
            for group in groups.values():
                group.stop()
    return statistics.median(seconds["with"]), statistics.median(seconds["without"])


def measure(args: argparse.Namespace, processes: int, level: str) -> None:
    """Times pair after pair and prints a line."""
    pairs = [pair(args, processes, level) for _ in range(args.pairs)]
    guarded, alone = ([each[i] for each in pairs] for i in (0, 1))
    step = 1000 * statistics.median(alone) / STEPS
    found = ratio(guarded, alone)
    print(
        f"{args.model}, {processes} process(es), {level:<7} {step:6.1f} ms a step without "
        f"({1000 * min(alone) / STEPS:.1f} to {1000 * max(alone) / STEPS:.1f}), "
        f"with / without {found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--levels", nargs="*", default=["os", "p_g_os"])
    parser.add_argument("--model", choices=PROBLEMS, default="gpt")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--examples", type=int, default=4, help="of a device in a step")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of new processes to time")
    parser.add_argument("--rounds", type=int, default=20, help="of ten steps each, in a pair")
    parser.add_argument("--serve", choices=("with", "without"), help=argparse.SUPPRESS)
    parser.add_argument("--status", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is None:
        for processes, level in itertools.product(args.processes, args.levels):
            measure(args, processes, level)
        return
    guarded = args.serve == "with"
    status = Path(f"{args.status}-{rank()}")
    if guarded:  # as the launcher does, before gshard's modules are imported
        status.write_bytes(b"".ljust(21) + b"\n")
        os.environ["GSHARD_STATUS_FILE"] = str(status)

    def make() -> tuple[Callable[[], float], Callable[[], None]]:
        return program(args, args.levels[0], guarded), check

    def check() -> None:
        steps = int(status.read_bytes().split()[0].rstrip(b"+")) if guarded else 1
        assert steps > 0, "the launcher's file was not written"

    serve(make)


if __name__ == "__main__":
    main()
