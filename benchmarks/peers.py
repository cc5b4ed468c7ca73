"""The same GPT, weights and data in PyTorch and here: time of a step and memory of a process.

    python -m benchmarks.peers [--processes 2] [--examples 16] [--torch-python PATH] [--json FILE]

PyTorch's DistributedDataParallel, with ZeroRedundancyOptimizer, and FSDP2 (`fully_shard`), on CPU
over gloo, against gshard over as many processes of one device. All start with the same weights and
see the same batch; their losses have to agree. Each process has its own cores where there are
enough. Memory is what a process has after the last step, above what it had with libraries loaded
and connections made: weights, state, buffers and (gshard) what the compiler left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console
from rich.table import Table

from benchmarks.groups import ProcessGroup
from benchmarks.machine import versions, write_cells
from benchmarks.models import gpt
from benchmarks.peers_gshard import PARTITIONS
from benchmarks.timing import Ratio, in_turn, ratio

TORCH = ("DDP", "DDP + ZeRO", "FSDP2")
LEVELS = ("dp", "os", "os_g", "p_g_os", *PARTITIONS)
PEER = {"dp": "DDP", "os": "DDP + ZeRO", "os_g": "DDP + ZeRO", "p_g_os": "FSDP2"}
PEER |= dict.fromkeys(PARTITIONS, "DDP + ZeRO")
HEADS, CLOSE = 4, 1e-4


class Line(NamedTuple):
    """One program: seconds of a step, ratio to its peer, bytes of a process, loss at the end."""

    program: str
    seconds: float
    to_peer: Ratio | None
    memory: int
    loss: float


def measured(processes: int, examples: int, rounds: int, torch_python: str) -> list[Line]:
    """All programs, step by step in turn.

    Raises:
      SystemExit: their losses differ.
    """
    problem = gpt()
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.npz"
        weights = {name: np.asarray(x) for name, x in flatten_dict(problem.params, sep="/").items()}
        np.savez(path, batch=problem.batch(processes * examples), **weights)
        programs = [("benchmarks.peers_torch", name, torch_python) for name in TORCH]
        programs += [("benchmarks.peers_gshard", name, sys.executable) for name in LEVELS]
        groups: dict[str, ProcessGroup] = {}
        try:
            for module, name, python in programs:
                groups[name] = ProcessGroup(
                    module, [name, str(path), str(HEADS)], processes, python
                )

            def step(name: str) -> None:
                losses.setdefault(name, []).append(statistics.fmean(groups[name].step()))

            seconds = in_turn({name: partial(step, name) for name in groups}, rounds)
            memory = {name: max(group.end()) for name, group in groups.items()}
        finally:
            for group in groups.values():
                group.stop()
    if not np.all(np.isfinite(losses["dp"])):
        raise SystemExit(f"the loss of gshard's dp is not finite: {losses['dp']}.")
    for name, found in losses.items():
        if not np.allclose(found, losses["dp"], rtol=CLOSE, atol=CLOSE):
            worst = int(np.argmax(np.abs(np.subtract(found, losses["dp"]))))
            raise SystemExit(
                f"{name} does not train what dp does: after {worst} steps its loss is "
                f"{found[worst]:.6f}, and {losses['dp'][worst]:.6f} there."
            )
    return [
        Line(
            name,
            statistics.median(seconds[name]),
            ratio(seconds[name], seconds[PEER[name]]) if name in PEER else None,
            memory[name],
            losses[name][-1],
        )
        for name in groups
    ]


def table(lines: list[Line], title: str) -> Table:
    """What a person looks at."""
    found = Table(title=title)
    for head in ("program", "ms", "to its peer", "MiB a process", "last loss"):
        found.add_column(head, justify="left" if head == "program" else "right")
    for line in lines:
        peer = f"{line.to_peer} of {PEER[line.program]}" if line.to_peer else ""
        name = line.program if line.to_peer is None else f"gshard {line.program}"
        cost = f"{1000 * line.seconds:.1f}", peer, f"{line.memory / 2**20:.0f}"
        found.add_row(name, *cost, f"{line.loss:.5f}")
    return found


def torch_version(python: str) -> str:
    """Of the PyTorch that a Python has.

    Raises:
      SystemExit: it has none.
    """
    code = "import torch; print(torch.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"peers: --torch-python {python} does not run: {error}.") from None
    if done.returncode:
        raise SystemExit(
            f"peers: {python} does not import PyTorch: pip install 'gshard[peers]', or name a "
            "Python that has it (and NumPy) with --torch-python.\n" + done.stderr[-500:]
        )
    return done.stdout.strip()


def main() -> None:
    """Runs the benchmark, prints its table and writes its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--examples", type=int, default=16, help="of each process")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    torch = torch_version(args.torch_python)
    lines = measured(args.processes, args.examples, args.rounds, args.torch_python)
    title = (
        f"torch {torch}, jax {versions()['jax']}; {args.processes} processes with "
        f"{args.examples} examples each, {os.cpu_count()} cores"
    )
    Console(width=110).print(table(lines, title))
    if args.json:
        about = {"cores": os.cpu_count(), "processes": args.processes, "examples": args.examples}
        write_cells(args.json, lines, about | {"torch": torch})


if __name__ == "__main__":
    main()
