"""The order in which `gshard advise` puts options, next to measured steps.

    python -m benchmarks.advice --model gpt --devices 8 [--rounds 15] [--json FILE]

Uses this machine's accelerators, and larger models, or virtual CPU devices. Calibrates, asks
`advise` for the seconds of each option (all levels, 1, 2 and 4 micro-batches for the same examples,
with and without rematerialization), runs the steps of all options in turn, and compares what was
predicted with the medians by Spearman's rank correlation. On CPUs it does the same with the CPU
time of a step, which other programs on the machine disturb less: devices that share cores keep them
busy, so a step takes about its CPU time divided by the cores. On one device all levels are the
same, so only p_g_os is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import numpy as np

import gshard
from benchmarks.calibration import calibration
from benchmarks.machine import target_of
from benchmarks.timing import WARM_UP, in_turn
from gshard._util.text import seconds_of, text_of, text_table
from gshard.analysis.calibration import Calibration
from gshard.analysis.config import Config
from gshard.analysis.setup import Choices, batch_of, initialized_setup, load_setup, step_of
from gshard.analysis.tune import Verdict, advise
from gshard.sharding.level import LEVELS

PARTS = ("compute", "memory", "wire", "update", "all_gather_params", "starts")
EXAMPLES = 4  # of a device in a step: as many as there are ways to split it into 1, 2 and 4
_TRANSFORMER: dict[str, Any] = {"layers": 3, "width": 192, "heads": 4, "dtype": "float32"}
_LLAMA = _TRANSFORMER | {"kv_heads": 4, "mlp": 512, "vocabulary": 512, "sequence": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("benchmarks.advice_models:mlp", {}),
    "gpt": (
        "gshard.models.gpt2:setup",
        _TRANSFORMER | {"vocabulary": 512, "positions": 32},
    ),
    "conv": ("benchmarks.advice_models:conv", {}),
    "llama": ("gshard.models.llama:setup", _LLAMA),
    "moe": ("gshard.models.moe:setup", _LLAMA | {"experts": 4, "group": 32}),
}
_WIDE: dict[str, Any] = {"layers": 8, "width": 1024, "heads": 16}
_LONG = _WIDE | {"kv_heads": 16, "mlp": 2816, "vocabulary": 8192, "sequence": 1024}
ON_ACCELERATORS: dict[str, dict[str, Any]] = {
    "mlp": {"width": 1024, "layers": 8, "tokens": 1024},
    "gpt": _WIDE | {"vocabulary": 8192, "positions": 1024, "dtype": "bfloat16"},
    "conv": {"width": 128, "blocks": 2, "side": 128},
    "llama": _LONG | {"dtype": "float32"},
    "moe": _LONG | {"experts": 4, "group": 1024},
}


def sized(name: str) -> tuple[str, dict[str, Any]]:
    """A model's function and its arguments on the devices of this process."""
    model, arguments = MODELS[name]
    on_cpu = jax.default_backend() == "cpu"
    return model, arguments if on_cpu else ON_ACCELERATORS[name]


def predicted(name: str, measured: Calibration) -> list[Verdict]:
    """What `advise` says of a model's options, without those that keep gathered parameters."""
    model, arguments = sized(name)
    device, count = jax.devices()[0], measured.devices
    target = target_of(device, count)
    if target is None or target.platform == "tpu":
        raise SystemExit(f"advise has no target for {count} x {device.device_kind}")
    config = Config(
        model,
        arguments,
        target=target,
        devices=count,
        levels=tuple(LEVELS) if count > 1 else ("p_g_os",),
        choices=Choices(micro_batch_size=EXAMPLES),
        vary={"remat": ["none", "full"]},
    )
    found = advise(config, measured=measured)
    return [x for x in found if x.option.choices.reshard_after_forward is True]


def program(name: str, of: Verdict, cpu_seconds: list[float]) -> Callable[[], object]:
    """A function that runs a step of an option, and adds its CPU time to a list."""
    model, arguments = sized(name)
    option, mesh = of.option, gshard.make_mesh()
    setup = load_setup(model, {**arguments, **option.arguments})
    state, plan = initialized_setup(setup, mesh, option.level, option.choices)
    step = step_of(setup, plan, option.choices)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 8, x.shape).astype(x.dtype), x.sharding),
        batch_of(setup, plan, option.choices),
    )

    def run() -> None:
        nonlocal state
        start = time.process_time()
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        cpu_seconds.append(time.process_time() - start)

    return run


def spearman(x: list[float], y: list[float]) -> float:
    """The correlation of ranks; ties have the mean of their ranks."""

    def ranks(values: list[float]) -> np.ndarray:
        _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[where]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def main() -> None:
    """Measures, and prints a table and the correlation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt", choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every figure here too")
    args = parser.parse_args()
    with suppress(gshard.GShardError):  # there is an accelerator
        gshard.virtual_devices(args.devices)
    about = calibration(small=jax.default_backend() == "cpu")["calibration"]
    print(json.dumps(about), flush=True)
    options = predicted(args.model, Calibration(**about))
    cpu: list[list[float]] = [[] for _ in options]
    programs = {str(i): program(args.model, x, cpu[i]) for i, x in enumerate(options)}
    times = in_turn(programs, args.rounds)
    cpu_seconds = [mean(x[WARM_UP:]) for x in cpu]  # its clock is coarse
    seconds = [median(x) for x in times.values()]
    expected = [x.cost.step if x.cost else float("inf") for x in options]
    rows = []
    for i in np.argsort(seconds):
        x = options[i]
        parts = [getattr(x.cost, part) for part in PARTS] if x.cost else []
        names = (x.option.level, str(x.option.choices.micro_batches), x.option.extras_text)
        shown = (seconds[i], cpu_seconds[i], expected[i], *parts)
        rows.append((*names, *map(seconds_of, shown)))
    columns = ("measured", "CPU time", "predicted", *PARTS)
    print(text_of([text_table(args.model, ("level", "micro-batches", "with"), columns, rows)]))
    lost = seconds[0] / min(seconds) - 1  # `advise` puts the option first that it recommends
    halves = ([median(x[i::2]) for x in times.values()] for i in (0, 1))
    print(f"Spearman {spearman(expected, seconds):.3f} of {len(options)} options")
    print(f"of both halves of the rounds with each other: {spearman(*halves):.3f}")
    halves = ([mean(x[WARM_UP + i :: 2]) for x in cpu] for i in (0, 1))
    print(f"Spearman {spearman(expected, cpu_seconds):.3f} with CPU time")
    print(f"of both halves of the rounds with each other: {spearman(*halves):.3f}")
    print(f"the advised option takes {lost:.1%} longer than the fastest")
    if args.json:
        rows = [
            dataclasses.asdict(x.option)
            | {"seconds": s, "cpu": c, "cost": x.cost and x.cost.as_dict()}
            for x, s, c in zip(options, times.values(), cpu, strict=True)
        ]
        args.json.write_text(json.dumps({"calibration": about, "options": rows}) + "\n")


if __name__ == "__main__":
    main()
