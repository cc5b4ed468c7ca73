"""Step time of every level against `dp` and against plain `jit` on one device, in one process.

    python -m benchmarks.step [--devices 8] [--rounds 30] [--width 256] [--layers 4]

Machines are noisy, so nothing is timed alone: every round runs one step of each program in turn,
and what is reported is the median of the rounds' ratios with the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.table import Table

import gshard

LEVELS = ("dp", "os", "os_g", "p_g_os")


class Residual(nn.Module):
    """A residual multilayer perceptron: matrix products and nothing that needs explaining."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, x_BxD):
        for _ in range(self.layers):
            h_BxF = nn.gelu(nn.Dense(4 * self.width)(x_BxD))
            x_BxD = x_BxD + nn.Dense(self.width)(h_BxF)
        return x_BxD


def steppers(devices: int, width: int, layers: int, rows: int) -> dict[str, Callable[[], Any]]:
    """One function per program; each call runs one step and waits for it."""
    model = Residual(width, layers)
    x_BxD = np.random.default_rng(0).normal(size=(devices * rows, width)).astype(np.float32)
    params = model.init(jax.random.key(0), x_BxD[:1])["params"]

    def loss_fn(params, x_BxD):
        return jnp.square(model.apply({"params": params}, x_BxD)).mean()

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def keep_stepping(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Any]:
        def one() -> None:
            nonlocal state
            state, out = step(state, batch)
            jax.block_until_ready(out)

        return one

    def plain(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    on_one = jax.device_put(jax.tree.map(jnp.copy, fresh()), jax.devices()[0])
    found = {"one device": keep_stepping(jax.jit(plain, donate_argnums=0), on_one, x_BxD)}
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    for level in LEVELS:
        state, plan = gshard.shard_train_state(fresh(), mesh, level)
        batch = gshard.shard_batch(x_BxD, plan)
        found[level] = keep_stepping(gshard.make_train_step(loss_fn, plan), state, batch)
    return found


def rounds(programs: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Seconds of one step of every program, in `count` rounds after two of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(count + 2):
        for name, one in programs.items():
            start = time.perf_counter()
            one()
            if i >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="rows per device")
    args = parser.parse_args()
    gshard.virtual_devices(args.devices)
    seconds = rounds(steppers(args.devices, args.width, args.layers, args.rows), args.rounds)

    table = Table(title=f"jax {jax.__version__}, {args.devices} x {jax.devices()[0].device_kind}")
    for name in ("program", "median ms", "against dp", "against one device"):
        table.add_column(name, justify="left" if name == "program" else "right")
    for name, times in seconds.items():
        cells = []
        for base in ("dp", "one device"):
            ratios = [a / b for a, b in zip(times, seconds[base], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        table.add_row(name, f"{1000 * statistics.median(times):.1f}", *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
