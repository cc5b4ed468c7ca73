"""Hundreds of calls that nothing waits for end, on virtual CPU devices, where JAX aborts."""

from __future__ import annotations

import pytest

from tests.processes import run_together

SCRIPT = """
import sys
import gshard
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

OWN_LOOP = """
import gshard
gshard.virtual_devices(4)
import jax, jax.numpy as jnp, numpy as np, optax

params = {f"layer {i}": np.ones((16, 16), np.float32) / 16 for i in range(5)}
state, plan = gshard.shard_train_state(
    (params, optax.sgd(0.001)), gshard.make_mesh(), "os", min_shard_size=0
)

def loss(params, batch):
    for x in params.values():
        batch = jnp.tanh(batch @ x)
    return jnp.mean(batch)

gradient = gshard.value_and_grad(loss, plan)

def own_step(state, batch):
    loss, grads = gradient(state.params, batch)
    return state.apply_gradients(grads=grads), loss

own_step = jax.jit(own_step, donate_argnums=0)
batch = gshard.shard_batch(np.ones((32, 16), np.float32), plan)
for _ in range(500):
    state, last = own_step(state, batch)
print("ended", float(last))
"""
SOON = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=5"}


@pytest.mark.parametrize("what", ["evaluation", "train"])
def test_calls_that_nothing_waits_for_end(what, tmp_path):
    (script := tmp_path / "calls.py").write_text(SCRIPT)
    few = {"XLA_FLAGS": f"{SOON['XLA_FLAGS']} --xla_force_host_platform_device_count=5"}  # threads
    (ended,) = run_together(tmp_path, [[str(script), what]], [few], limit=200)
    assert ended.code == 0 and "ended" in ended.said, ended.said[-2000:]


def test_an_own_loop_that_waits_for_nothing_ends(tmp_path):
    (script := tmp_path / "own_loop.py").write_text(OWN_LOOP)
    (ended,) = run_together(tmp_path, [[str(script)]], [SOON], limit=200)
    assert ended.code == 0 and "ended" in ended.said, ended.said[-2000:]
