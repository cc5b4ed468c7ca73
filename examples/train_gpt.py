"""Train a small GPT on the Python standard library, at every level, on virtual CPU devices.

    python -m examples.train_gpt [configs/demo.toml] [--steps 50] [--model.width 128] ...

As one of several processes, which share the devices, it prints on the first alone.

Every run starts from the same parameters and sees the same batches, so that all of them should
give the numbers of one device. What they differ in is what a device holds and moves: the table at
the end shows it, measured, beside what the plan promised.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.text import Text

import gshard
from examples import gpt, text
from examples.config import Config, ConfigError, parse
from examples.measure import (
    KINDS,
    PARTS,
    Run,
    bytes_on_first_device,
    carried_by_micro_batch_loop,
)
from examples.report import TABLE_WIDTH, Meter, RunMeter, table, write_picture


def make_state(config: Config) -> tuple[gpt.GPT, TrainState]:
    """An ordinary Flax model and train state, on one device."""
    settings, o = config.model, config.optimizer
    model = gpt.GPT(settings.width, settings.layers, settings.heads, settings.scan, settings.remat)
    bytes_1xT = np.zeros((1, settings.sequence), np.uint8)
    params = jax.jit(model.init)(jax.random.key(config.seed), bytes_1xT)["params"]
    rate = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, o.warmup_steps, max(config.steps, o.warmup_steps + 1)
    )
    tx = optax.chain(
        optax.clip_by_global_norm(o.clip),
        # eps: with the usual 1e-8, a gradient that is zero but for rounding still moves its
        # parameter by a whole step, and no two orders of summation agree on it.
        optax.adamw(rate, b2=0.95, eps=1e-5, weight_decay=o.weight_decay),
    )
    return model, TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_on_one_device(model, state, batch_of, config: Config, meter: RunMeter) -> Run:
    """The ordinary Flax loop, without gshard: what all others are compared with."""

    def train_step(state, batch_BxT1):
        loss, grads = jax.value_and_grad(
            lambda params: gpt.next_byte_loss(model, params, batch_BxT1)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    run = Run("one device")
    with meter.phase("compiling"):
        step = jax.jit(train_step).lower(state, batch_of(0)).compile()
    run.bytes = {
        "params": bytes_on_first_device(state.params),
        "optimizer": bytes_on_first_device(state.opt_state),
    }
    clock = time.monotonic()
    for i in range(config.steps):
        state, loss = step(state, batch_of(i))
        run.losses.append(float(loss))
        run.tokens_per_second = tokens(config) * (i + 1) / (time.monotonic() - clock)
        meter.step(i + 1, run.losses[-1], run.tokens_per_second)
    return run


def train_at(level: str, mesh, model, start, own_rows, config: Config, meter: RunMeter):
    """The same with gshard: two calls, and a loop that looks like the one above."""

    def loss_fn(params, batch_BxT1):
        return gpt.next_byte_loss(model, params, batch_BxT1)

    with meter.phase("dividing"):
        state, plan = gshard.shard_train_state(start, mesh, level, **how_to_divide(config))
        step = gshard.make_train_step(loss_fn, plan, micro_batches=config.micro_batches)
    with meter.phase("compiling"):
        run = measured(level, step, state, own_rows(0))

    clock = time.monotonic()
    for i in range(config.steps):
        state, metrics = step(state, own_rows(i))
        run.losses.append(float(metrics["loss"]))
        run.tokens_per_second = tokens(config) * (i + 1) / (time.monotonic() - clock)
        meter.step(i + 1, run.losses[-1], run.tokens_per_second)

    # Of the arrays after training: a layout that drifted would show.
    run.bytes |= {
        "params": bytes_on_first_device(state.params),
        "optimizer": bytes_on_first_device(state.opt_state),
    }
    return run, state


def measured(level: str, step, state, batch) -> Run:
    """What the compiled step carries and communicates, beside the promise. Nothing runs yet."""
    audit = gshard.audit(step, state, batch)
    promise = audit.promise
    return Run(
        level,
        bytes={"gradients": carried_by_micro_batch_loop(step.lower(state, batch).compile())},
        promised_bytes={part: promise.resident[part] for part in PARTS},
        moved={kind: audit.elements(kind) for kind in KINDS},
        promised_moved={kind: promise.elements(kind) for kind in KINDS},
        at_most=tuple(moved.kind for moved in promise.moved if moved.at_most),
    )


def how_to_divide(config: Config) -> dict:
    # A scanned stack of layers is divided inside a layer, never between layers.
    scan_axes = {"^blocks/": 0} if config.model.scan else None
    return {"segment_size": config.segment_size, "scan_axes": scan_axes}


def tokens(config: Config) -> int:
    return config.batch_size * config.model.sequence


def printable(sampled: bytes) -> str:
    letters = sampled.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in letters.expandtabs())


def main(config: Config) -> None:
    began = time.monotonic()

    # ---- processes, devices, text, model ---------------------------------------------------------

    jax.config.update("jax_platforms", "cpu")
    gshard.init_parallel_env()  # alone, or one of several processes that share the devices
    rank, processes = gshard.get_rank(), gshard.get_world_size()
    each = config.devices // processes
    if config.devices % processes:
        raise ConfigError(f"devices={config.devices} do not divide over {processes} processes")
    gshard.virtual_devices(each)  # before anything else uses JAX
    mesh = gshard.make_mesh(
        devices=[device for i in range(processes) for device in jax.local_devices(i)[:each]]
    )
    console = Console(highlight=False, markup=False, quiet=rank > 0)

    text_N = text.standard_library()

    def batch_of(step: int) -> np.ndarray:
        length = config.model.sequence + 1  # the last byte is only predicted
        return text.batch(text_N, step, config.batch_size, length, config.seed)

    def own_rows(step: int) -> np.ndarray:
        return np.split(batch_of(step), processes)[rank]  # of the batch that all make alike

    model, start = make_state(config)
    parameters = sum(x.size for x in jax.tree.leaves(start.params))
    console.print(
        f"GPT of {parameters:,} parameters, {text_N.size:,} bytes of Python source; "
        f"{config.steps} steps of {config.batch_size} rows x {config.model.sequence} bytes on "
        f"{config.devices} virtual CPU devices"
        + (f" of {processes} processes, " if processes > 1 else ", ")
        + f"{config.micro_batches} micro-batches a step"
    )
    # A plan needs no arrays: a level that does not exist is refused now, not after the first run.
    for level in config.levels:
        gshard.shard_train_state(
            jax.eval_shape(lambda: start), mesh, level, **how_to_divide(config)
        )

    # ---- one run on one device, one run per level ------------------------------------------------

    runs = []
    with Meter(console) as meter:
        reference = train_on_one_device(
            model, start, batch_of, config, meter.run("one device", config.steps)
        )
        for level in config.levels:
            run, state = train_at(
                level, mesh, model, start, own_rows, config, meter.run(level, config.steps)
            )
            runs.append(run)

    # ---- what came out ---------------------------------------------------------------------------

    whole = gshard.full_params(state)  # on the host: every process calls it, and has them
    if rank > 0:
        return
    console.print()
    # The table is never cut: a narrow terminal breaks its lines, a file has them whole.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table(reference, runs, config.micro_batches))

    key = jax.random.key(config.seed)
    sampled = gpt.sample(
        model,
        whole,
        config.prompt.encode(),
        config.sample_bytes,
        config.model.sequence,
        key,
    )
    console.print(f"\nSampled from the model trained at {config.levels[-1]}:\n", style="bold")
    console.print(Text(printable(sampled)), soft_wrap=True)

    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    results = {"reference": asdict(reference), "runs": [asdict(run) for run in runs]}
    (output / "results.json").write_text(json.dumps(results, indent=1))
    console.print(f"\nfigures: {output / 'results.json'}")
    write_picture(output / "memory_and_loss.png", reference, runs, console)
    console.print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    try:
        main(parse(description=__doc__.splitlines()[0]))
    except (ConfigError, gshard.GShardError) as error:
        sys.exit(f"error: {error}")
