"""Train a small GPT on the Python standard library, at every level, on virtual CPU devices.

    python -m examples.train_gpt [configs/demo.toml] [--steps 50] [--arguments.width 120] ...

With several processes, which share the devices, only the first prints. With `--checkpoints FOLDER`
it saves while it trains, also after SIGTERM (all processes at the same step, exit code 75), and the
same command resumes from there, at the level where it was.

Every run starts from the same parameters and sees the same batches, so all of them should match
single-device training. They differ in what a device stores and communicates: the table at the end
shows the measured figures and the plan's budget.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

import gshard
from examples import gpt, text
from examples.checkpoints import refuse_other_settings
from examples.config import Config, ConfigError, parse
from examples.report import TABLE_WIDTH, Meter, table, write_picture
from examples.training import make_state, train_at, train_on_one_device


def printable(sampled: bytes) -> str:
    letters = sampled.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in letters.expandtabs())


def main(config: Config) -> None:
    began = time.monotonic()

    # ---- processes, devices, text, model ---------------------------------------------------------

    jax.config.update("jax_platforms", "cpu")
    gshard.distributed.initialize()  # alone, or one of several processes that share the devices
    rank, processes = gshard.distributed.process_index(), gshard.distributed.process_count()
    each = config.devices // processes
    if config.devices % processes:
        raise ConfigError(f"devices={config.devices} do not divide over {processes} processes")
    gshard.virtual_devices(each)  # before anything else uses JAX
    mesh = gshard.make_mesh(
        devices=[device for i in range(processes) for device in jax.local_devices(i)[:each]],
        expert=config.expert,
    )
    console = Console(highlight=False, markup=False, quiet=rank > 0)

    text_N = text.standard_library()

    def batch_of(step: int) -> np.ndarray:
        length = config.arguments.sequence + 1  # the last byte is only predicted
        return text.batch(text_N, step, config.batch_size, length, config.seed)

    def own_rows(step: int) -> np.ndarray:
        return text.own_rows(batch_of(step), rank, processes)

    model, start = make_state(config)
    parameters = sum(x.size for x in jax.tree.leaves(start.params))
    console.print(
        f"GPT of {parameters:,} parameters, {text_N.size:,} bytes of Python source; "
        f"{config.steps} steps of {config.batch_size} examples x {config.arguments.sequence} bytes "
        f"on {config.devices} virtual CPU devices"
        + (f" of {processes} processes, " if processes > 1 else ", ")
        + f"{config.micro_batches} micro-batches a step"
    )
    refuse_other_settings(config)

    # ---- one run on one device, one run per level ------------------------------------------------

    runs = []
    with Meter(console) as meter:
        reference = None
        if config.one_device:
            reference = train_on_one_device(
                model, start, batch_of, config, meter.run("one device", config.steps)
            )
        for level in config.levels:
            run, state = train_at(
                level, mesh, model, start, own_rows, config, meter.run(level, config.steps)
            )
            runs.append(run)

    # ---- what came out ---------------------------------------------------------------------------

    full = gshard.full_params(state)  # on the host: every process calls it, and has them
    if rank > 0:
        return
    console.print()
    # The table is never cut: a narrow terminal breaks its lines, a file has them in full.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table(reference, runs, config.micro_batches))

    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    results = {
        "settings": asdict(config),
        "reference": asdict(reference) if reference else None,
        "runs": [asdict(run) for run in runs],
    }
    (output / "results.json").write_text(json.dumps(results, indent=1))

    key = jax.random.key(config.seed)
    sampled = gpt.sample(
        model,
        full,
        config.prompt.encode(),
        config.sample_bytes,
        config.arguments.sequence,
        key,
    )
    console.print(f"\nSampled from the model trained at {config.levels[-1]}:\n", style="bold")
    console.print(Text(printable(sampled)), soft_wrap=True)

    console.print(f"\nfigures: {output / 'results.json'}")
    write_picture(output / "memory_and_loss.png", reference, runs, console)
    console.print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    try:
        main(parse(description=__doc__.splitlines()[0]))
    except (ConfigError, gshard.GShardError) as error:
        sys.exit(f"error: {error}")
