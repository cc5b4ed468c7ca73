"""What fewer bits on the wire and in the optimizer state do to the loss of the demo's GPT.

    python -m benchmarks.quantized --seeds 0 1 2 3 4 --steps 500 --json FILE

Every run trains the GPT of `make demo` at p_g_os on virtual CPU devices, in float32 but for what
its row names, and evaluates it on text that it was not trained on. The seed is that of parameters
and batches. "int4 to nearest" is what ZeRO++'s kernels in DeepSpeed do. Runs that FILE has are
not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import gshard
from benchmarks.processes import on_cpu
from examples import gpt
from examples.config import Config
from examples.text import batch, standard_library
from examples.training import make_state

HELD_OUT, EVALUATIONS = 100_000, 32
MUON_RATE = 2e-3


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      gather_dtype: of parameters on the wire.
      scatter_dtype: of gradients on the wire.
      state_dtype: of the optimizer's moments.
      muon: whether Muon trains it, instead of AdamW.
    """

    gather_dtype: str | None = None
    scatter_dtype: str | gshard.Quantized | None = None
    state_dtype: str | None = None
    muon: bool = False


ROWS = {
    "float32": Row(),
    "wire int8, int8": Row("int8", "int8"),
    "wire int8, int4": Row("int8", "int4"),
    "wire int8, int4 to nearest": Row("int8", gshard.Quantized("int4", rounding="nearest")),
    "wire float8_e4m3fn, float8_e5m2": Row("float8_e4m3fn", "float8_e5m2"),
    "state int8": Row(state_dtype="int8"),
    "wire and state int8": Row("int8", "int8", "int8"),
    "Muon, float32": Row(muon=True),
    "Muon, state int8": Row(state_dtype="int8", muon=True),
    "Muon, wire and state int8": Row("int8", "int8", "int8", muon=True),
}
EXACT = {False: "float32", True: "Muon, float32"}  # what a row is compared with


def run(name: str, seed: int, steps: int, text_N: np.ndarray) -> dict[str, Any]:
    """Trains once; the mean loss of the last 20 steps, and the loss on text that is held out."""
    config = dataclasses.replace(Config(), seed=seed, steps=steps, micro_batches=1)
    length, examples = config.arguments.sequence + 1, config.batch_size
    model, state = make_state(config)
    row = ROWS[name]
    if row.muon:
        tx = optax.contrib.muon(MUON_RATE)
        state = state.replace(tx=tx, opt_state=tx.init(state.params))
    precision = gshard.Precision(
        "float32",
        gather_dtype=row.gather_dtype,
        scatter_dtype=row.scatter_dtype,
        state_dtype=row.state_dtype,
    )
    state, plan = gshard.shard_train_state(
        state,
        gshard.make_mesh(),
        "p_g_os",
        min_shard_size=config.arguments.min_shard_size,
        precision=precision,
    )

    def loss_fn(params: Any, batch_BxT1: Any) -> Any:
        return gpt.next_byte_loss(model, params, batch_BxT1)

    step, losses, start = gshard.make_train_step(loss_fn, plan), [], time.monotonic()
    for i in range(steps):
        rows = batch(text_N[:-HELD_OUT], i, examples, length, seed)
        state, metrics = step(state, rows)
        losses.append(metrics["loss"])
    evaluate = jax.jit(loss_fn)
    params = gshard.full_params(state)
    held_out = [
        float(evaluate(params, batch(text_N[-HELD_OUT:], i, examples, length, 10_000)))
        for i in range(EVALUATIONS)
    ]
    return {
        "row": name,
        "seed": seed,
        "steps": steps,
        "devices": plan.group.devices,
        "last": float(np.mean([float(x) for x in losses[-20:]])),
        "validation": float(np.mean(held_out)),
        "seconds": round(time.monotonic() - start, 1),
    }


def table(runs: list[dict[str, Any]], steps: int, devices: int) -> Table:
    """A row for each of `ROWS` that was run so, and the change of its validation loss by seed."""
    title = f"demo GPT, p_g_os, {steps} steps on {devices} devices"
    shown = Table(title=title, title_justify="left")
    runs = [x for x in runs if (x["steps"], x["devices"]) == (steps, devices)]
    for column in ("row", "seeds", "last 20", "validation", "to float32", "by seed"):
        shown.add_column(column)
    validation = {(x["row"], x["seed"]): x["validation"] for x in runs}
    for name, row in ROWS.items():
        found = [x for x in runs if x["row"] == name and (EXACT[row.muon], x["seed"]) in validation]
        if not found:
            continue
        exact = [validation[EXACT[row.muon], x["seed"]] for x in found]
        changes = [100 * (x["validation"] / y - 1) for x, y in zip(found, exact, strict=True)]
        means = [statistics.mean(x[key] for x in found) for key in ("last", "validation")]
        by_seed = " ".join(f"{x:+.2f}" for x in changes)
        change = f"{statistics.mean(changes):+.2f} %"
        shown.add_row(name, str(len(found)), *(f"{x:.4f}" for x in means), change, by_seed)
    return shown


def main() -> None:
    """Runs every seed of every row; keeps each result as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized")
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    on_cpu(args.devices)
    text_N, runs = standard_library(), []
    if args.json is not None and args.json.exists():
        runs = json.loads(args.json.read_text())
    for seed in args.seeds:
        for name in args.rows:
            wanted = {"row": name, "seed": seed, "steps": args.steps, "devices": args.devices}
            if any(wanted.items() <= x.items() for x in runs):
                continue
            runs.append(run(name, seed, args.steps, text_N))
            if args.json is not None:
                args.json.write_text(json.dumps(runs, indent=1) + "\n")
    Console().print(table(runs, args.steps, args.devices))


if __name__ == "__main__":
    main()
