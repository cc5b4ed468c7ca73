"""Hundreds of calls that nothing waits for end, on virtual CPU devices, where JAX aborts."""

from __future__ import annotations

import pytest

from tests.processes import run_together

SCRIPT = """
import sys
import gshard
gshard.virtual_devices(5)
import jax, jax.numpy as jnp, numpy as np, optax

shapes = {"stack": (4, 10, 10), "other": (4, 10, 10), "a": (10, 7), "b": (10, 7)}
params = {k: np.ones(s, np.float32) / 8 for k, s in shapes.items()}
state, plan = gshard.shard_train_state(
    (params, optax.sgd(0.01)), gshard.make_mesh(), "zero3", min_shard_size=16,
    scan_axes={"^stack|^other": 0},
)

def loss(p, b):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    x, _ = jax.lax.scan(layer, b, p["stack"])
    y, _ = jax.lax.scan(layer, b * 2, p["other"])
    return jnp.mean((x @ p["a"]) ** 2) + jnp.mean((y @ p["b"]) ** 2)

step = gshard.make_eval_step(loss, plan)
draw = lambda i: np.random.default_rng(i).normal(size=(40, 10)).astype("f4")
if sys.argv[1] == "train":
    train = gshard.make_train_step(loss, plan, donate=False)
    step = lambda state, b: train(state, b)[1]["loss"]
found = [step(state, draw(i)) for i in range(1500)]
print("ended", np.mean(jax.device_get(found)))
"""


@pytest.mark.parametrize("what", ["evaluation", "train"])
def test_calls_that_nothing_waits_for_end(what, tmp_path):
    (script := tmp_path / "calls.py").write_text(SCRIPT)
    soon = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=5"}
    (ended,) = run_together(tmp_path, [[str(script), what]], [soon], limit=200)
    assert ended.code == 0 and "ended" in ended.said, ended.said[-2000:]
