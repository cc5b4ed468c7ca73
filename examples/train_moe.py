"""Train a small mixture of experts, whose experts stay on their devices, beside a dense GPT.

    python -m examples.train_moe [configs/moe.toml] [--steps 50] [--arguments.experts 16] ...

All runs see the same batches of the Python standard library, on virtual CPU devices. Experts are
trained on one device; then at every level, kept on the devices of a mesh axis; then at the last
level without such an axis, where they are gathered like other parameters. The dense model has as
many active parameters: those that compute one byte. The table shows what each run stores and sends,
and that the losses are those of one device.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gshard
from examples import gpt, text
from examples.checkpoints import refuse_other_settings
from examples.config import Config, ConfigError, parse
from examples.measure import Run
from examples.report import TABLE_WIDTH, Meter, size
from examples.training import make_state, setup, train_at, train_on_one_device

HELD_OUT = 10**9  # the step whose batch nothing is trained on
KERNELS = ("up", "down")  # of experts


def main(config: Config) -> None:
    began = time.monotonic()
    if not config.arguments.experts:
        raise ConfigError("arguments.experts=0: this demo trains experts, such as configs/moe.toml")
    jax.config.update("jax_platforms", "cpu")
    gshard.virtual_devices(config.devices)  # before anything else uses JAX
    console = Console(highlight=False, markup=False)
    mesh, without = gshard.make_mesh(expert=config.expert), gshard.make_mesh()
    text_N = text.standard_library()

    def batch_of(step: int, examples: int = config.batch_size) -> np.ndarray:
        length = config.arguments.sequence + 1  # the last byte is only predicted
        return text.batch(text_N, step, examples, length, config.seed)

    # ---- two models with the same active parameters ----------------------------------------------

    of_dense = dataclasses.replace(config.arguments, experts=0)
    dense = dataclasses.replace(config, arguments=of_dense, expert=1)
    model, start = make_state(config)
    dense_model, dense_start = make_state(dense)
    console.print(
        f"{config.arguments.experts} experts in each of {config.arguments.layers} blocks, "
        f"{config.arguments.chosen} for each byte: {parameters(start):,} parameters, of which "
        f"{active(start, config):,} are active; dense GPT: {parameters(dense_start):,}\n"
        f"{config.steps} steps of {config.batch_size} examples x {config.arguments.sequence} bytes "
        f"of Python source, on {config.devices} virtual CPU devices; experts on {config.expert}"
    )

    refuse_other_settings(config)

    # ---- the runs --------------------------------------------------------------------------------

    runs, last = [], config.levels[-1]
    with Meter(console) as meter:
        reference = train_on_one_device(
            model, start, batch_of, config, meter.run("one device", config.steps)
        )
        for level in config.levels:
            of_run = meter.run(level, config.steps)
            run, state = train_at(level, mesh, model, start, batch_of, config, of_run)
            runs.append(run)
        of_run = meter.run(f"{last}, gathered", config.steps)
        run, _ = train_at(last, without, model, start, batch_of, config, of_run)
        runs.append(run)
        of_run = meter.run(f"{last}, dense", config.steps)
        of_dense, dense_state = train_at(
            last, without, dense_model, dense_start, batch_of, dense, of_run
        )

    # ---- what came out ---------------------------------------------------------------------------

    console.print()
    console.width = max(console.width, TABLE_WIDTH)  # it is never cut
    console.print(table(reference, runs, of_dense, planned(config, mesh), config))
    other = batch_of(HELD_OUT, 256)
    losses = {
        "dense": gpt.cross_entropy(dense_model, gshard.full_params(dense_state), other)[0],
        "experts": gpt.cross_entropy(model, gshard.full_params(state), other)[0],
    }
    said = ", ".join(f"{name} {float(loss):.4f}" for name, loss in losses.items())
    console.print(f"\nCross-entropy of 256 other examples, in nats for a byte: {said}")
    off = max(run.off_by(reference) for run in runs)
    console.print(
        f"Losses of {len(runs)} runs are those of one device to {off:.1e}, in {config.steps} steps"
    )
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    results = {"reference": reference, "dense": of_dense, "runs": runs}
    (output / "results.json").write_text(json.dumps(results, default=dataclasses.asdict, indent=1))
    console.print(f"figures: {output / 'results.json'}")
    console.print(f"{time.monotonic() - began:.0f} s in all")


def parameters(state) -> int:
    return sum(x.size for x in jax.tree.leaves(state.params))


def active(state, config: Config) -> int:
    """Parameters that compute one byte."""
    params = state.params
    blocks = [params[name] for name in params if name.startswith("block")]
    of_experts = sum(
        x.size for block in blocks for x in jax.tree.leaves([block["experts"][k] for k in KERNELS])
    )
    idle = config.arguments.experts - config.arguments.chosen
    return parameters(state) - of_experts * idle // config.arguments.experts


def planned(config: Config, mesh) -> dict[str, int]:
    """Bytes that a device sends in a step at each level, from the shapes and the traced step."""
    shards = config.devices * config.micro_batches
    forecast = gshard.forecast(
        setup(**dataclasses.asdict(config.arguments)),
        mesh,
        levels=config.levels,
        micro_batch_size=config.batch_size // shards,
        micro_batches=config.micro_batches,
    )
    return {name: level.wire for name, level in forecast.levels.items()}


def table(
    reference: Run, runs: list[Run], dense: Run, plan: dict[str, int], config: Config
) -> Table:
    """A row for each run."""
    found = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Bytes on one device; bytes that one device sends in a step",
        title_justify="left",
        caption="sent: counted in the compiled program. planned: what `gshard plan` says of it. "
        "tokens: how much of it goes to experts and back. off by: largest difference of a loss "
        "from one device, over all steps.",
        caption_justify="left",
        title_style="bold",
    )
    found.add_column("", no_wrap=True)
    names = ("parameters", "optimizer", "sent", "planned", "tokens", "last loss", "off by")
    for name in (*names, "tokens/s"):
        found.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for run in (reference, *runs, dense):
        found.add_row(
            run.name,
            size(run.bytes["params"]),
            size(run.bytes["optimizer"]),
            "" if run is reference else size(run.sent),
            size(plan.get(run.name)),
            "" if run is reference else size(run.exchanged),
            f"{run.losses[-1]:.5f}",
            "" if run in (reference, dense) else f"{run.off_by(reference):.1e}",
            f"{run.tokens_per_second:,.0f}",
        )
    return found


if __name__ == "__main__":
    try:
        said = __doc__.splitlines()[0]
        without = "one_device", "prompt", "sample_bytes"
        main(parse(description=said, file="configs/moe.toml", without=without))
    except (ConfigError, gshard.GShardError) as error:
        sys.exit(f"error: {error}")
