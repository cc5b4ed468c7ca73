"""How long the first step takes to trace, lower and compile, against GSPMD.

    python -m benchmarks.first_step [--models gpt gpt-scan leaves-300] [--levels os p_g_os]
        [--rounds 3] [--compile-rounds 1] [--layers 12]

Every level of gshard and the same level of `benchmarks.gspmd`, in one process and in turn, with
JAX's caches cleared before each. The models are GPTs, and stacks of small layers with six
parameters each, 300 or 3,000 in all. The optimizer is AdamW with clipping. Times are processor time
of all threads. What is printed are the shortest of all rounds, and the ratios of these.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from benchmarks.gspmd import LEVELS, baseline
from benchmarks.models import Problem, gpt
from benchmarks.processes import mesh_of, on_cpu

DEVICES, EXAMPLES = 8, 16
STAGES = ("trace", "lower", "compile")


class Times(NamedTuple):
    """Seconds of processor time of each stage; `compile` is 0 where it was not measured."""

    trace: float
    lower: float
    compile: float


def leaves(layers: int, width: int = 136) -> Problem:
    """A stack of layers, each with six parameters, of which two are sharded."""
    rng = np.random.default_rng(0)

    def layer() -> dict[str, np.ndarray]:
        kernel = partial(rng.normal, 0, width**-0.5, (width, width))
        vector = np.zeros(width, np.float32)
        up, down = (kernel().astype(np.float32) for _ in range(2))
        return {
            "scale": vector + 1, "shift": vector, "up": up, "up_bias": vector, "down": down,
            "down_bias": vector,
        }  # fmt: skip

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for p in params.values():
            mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            h = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["shift"]
            x = jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
        return jnp.square(x).mean()

    def batch(examples: int) -> np.ndarray:
        return rng.normal(size=(examples, width)).astype(np.float32)

    return Problem(loss_fn, {f"layer_{i:03}": layer() for i in range(layers)}, batch)


MODELS: dict[str, Callable[[int], Problem]] = {
    "gpt": lambda layers: gpt(layers=layers),
    "gpt-scan": lambda layers: gpt(layers=layers, scan=True),
    "leaves-300": lambda _: leaves(50),
    "leaves-3000": lambda _: leaves(500),
}


def by_gshard(problem: Problem, level: str, tx: Any, mesh: Any) -> Callable[[], Any]:
    """A function that traces the step of `make_train_step`, after its plan is made."""
    params, batch = jax.eval_shape(lambda: (problem.params, problem.batch(EXAMPLES)))
    state, plan = gshard.shard_train_state(
        (params, tx), mesh, level, scan_axes={f"{stack}/": 0 for stack in problem.stacks} or None
    )
    step = gshard.make_train_step(problem.loss_fn, plan)
    return lambda: step.trace(state, batch)


def by_gspmd(problem: Problem, level: str, tx: Any, mesh: Any) -> Callable[[], Any]:
    """The same for the baseline."""
    made = baseline(problem.loss_fn, tx, problem.params, mesh, level, stacks=problem.stacks)
    params, batch = jax.eval_shape(lambda: (problem.params, problem.batch(EXAMPLES)))
    opt_state = jax.eval_shape(made.init, params)
    return lambda: made.step.trace(params, opt_state, batch)


def times(trace: Callable[[], Any], compiles: bool) -> Times:
    """Runs every stage once."""
    jax.clear_caches()
    gc.collect()
    clock = [time.process_time()]
    traced = trace()
    clock.append(time.process_time())
    lowered = traced.lower()
    clock.append(time.process_time())
    if compiles:
        lowered.compile()
        clock.append(time.process_time())
    seconds = [b - a for a, b in zip(clock, clock[1:], strict=False)]
    return Times(*seconds, *[0.0] * (len(STAGES) - len(seconds)))


def measure(
    problem: Problem, levels: tuple[str, ...], rounds: int, compile_rounds: int
) -> dict[tuple[str, str], Times]:
    """The shortest times by level and program, of programs that take turns."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = mesh_of(DEVICES)
    programs = {
        (level, name): make(problem, level, tx, mesh)
        for level in levels
        for name, make in (("gshard", by_gshard), ("gspmd", by_gspmd))
    }
    found: dict[tuple[str, str], list[Times]] = {key: [] for key in programs}
    for i in range(rounds):
        for key, trace in programs.items():
            found[key].append(times(trace, compiles=i < compile_rounds))
    return {key: shortest(several) for key, several in found.items()}


def shortest(several: list[Times]) -> Times:
    """The shortest time of each stage among the rounds that measured it."""
    stages = zip(*several, strict=True)
    return Times(*(min(filter(None, stage), default=0.0) for stage in stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=LEVELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12, help="of the GPTs")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}")
    for model in options.models:
        found = measure(
            MODELS[model](options.layers),
            tuple(options.levels),
            options.rounds,
            options.compile_rounds,
        )
        for level in options.levels:
            ours, theirs = (found[level, name] for name in ("gshard", "gspmd"))
            rows = zip((*STAGES, "all"), (*ours, sum(ours)), (*theirs, sum(theirs)), strict=True)
            stages = [f"{name} {a:.2f} / {b:.2f} = {a / b:.2f}" for name, a, b in rows if b]
            print(f"{model:11s} {level:6s}: {', '.join(stages)}", flush=True)


if __name__ == "__main__":
    on_cpu(DEVICES)
    main()
