"""How long a step takes to trace and lower, against plain `jit` on one device.

    python -m benchmarks.lowering [--layers 50 500] [--levels os_g p_g_os]

A stack of small layers, each with two parameters and its own equations, and AdamW. *Step* is plain
`jit` of the gradient and the update, *gradient* is `jit(value_and_grad(loss))`. Medians of three,
in processor time, with JAX's caches cleared before each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from benchmarks.gspmd import LEVELS


def lower_seconds(layers: int, level: str) -> tuple[float, float, float]:
    """Seconds to lower the plain gradient, the plain step, and gshard's step of one level."""
    layer = {"w": np.ones((16, 16), np.float32), "b": np.ones(16, np.float32)}
    params, x, tx = (
        {f"layer_{i}": layer for i in range(layers)},
        np.ones((16, 16)),
        optax.adamw(1e-3),
    )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.square(x).mean()

    def plain_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = tx.init(params)
    state, plan = gshard.shard_train_state(
        (params, tx), gshard.make_mesh(), level, min_shard_size=8
    )
    return (
        _median(lambda: jax.jit(jax.value_and_grad(loss)).lower(params, x)),
        _median(lambda: jax.jit(plain_step).lower(params, opt_state, x)),
        _median(lambda: gshard.make_train_step(loss, plan).lower(state, x)),
    )


def _median(lower: Callable[[], Any]) -> float:
    def once() -> float:
        jax.clear_caches()
        start = time.process_time()
        lower()
        return time.process_time() - start

    return statistics.median(once() for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", nargs="*", type=int, default=[50, 500])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=["os_g", "p_g_os"])
    options = parser.parse_args()
    for layers in options.layers:
        for level in options.levels:
            gradient, step, ours = lower_seconds(layers, level)
            print(
                f"{2 * layers:5d} parameters, {level:6s}: {ours:5.2f} s, "
                f"{ours / step:.1f} times a plain step, {ours / gradient:.1f} times a gradient"
            )


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
