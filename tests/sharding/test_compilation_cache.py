"""JAX's compilation cache on CPU devices: a program that is read from it gives the same bits."""

from __future__ import annotations

import pytest

from tests.processes import run_together

# All-gathers in loops, between them and after them: XLA keeps less of their order in a program from
# the cache than in one that it has compiled (gshard/train/comm/loop_order.py).
SCRIPT = """
import sys
import gshard
gshard.virtual_devices(5)
import jax, jax.numpy as jnp, numpy as np, optax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append("cache_hits" in name))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
shapes = {"stack": (4, 10, 10), "other": (4, 10, 10), "a": (10, 7), "b": (10, 7), "bias": (7,)}
params = {k: np.ones(s, np.float32) / 8 for k, s in shapes.items()}

def loss(p, b):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    x, _ = jax.lax.scan(layer, b, p["stack"])
    y, _ = jax.lax.scan(layer, b * 2, p["other"])
    return jnp.mean((x @ p["a"] + p["bias"]) ** 2) + jnp.mean((y @ p["b"]) ** 2)

state, plan = gshard.shard_train_state(
    (params, optax.lamb(0.01)), gshard.make_mesh(), "zero3", min_shard_size=16,
    scan_axes={"^stack|^other": 0},
)
train = gshard.make_train_step(loss, plan, bucket_size=0)
evaluate = gshard.make_eval_step(loss, plan)
for i in range(500):
    batch = np.random.default_rng(i).normal(size=(40, 10)).astype("f4")
    found = evaluate(state, batch)
    state, metrics = train(state, batch)
print(sum(hits), float(found).hex(), float(metrics["loss"]).hex())
"""


@pytest.mark.slow
def test_steps_from_the_cache_give_the_same_bits(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(tmp_path / "script.py"), str(tmp_path / "cache")]
    soon = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=10"}
    runs = [run_together(tmp_path, [command], [soon])[0] for _ in range(4)]
    assert [run.code for run in runs] == [0] * 4, runs
    hits, *results = zip(*(run.said.split()[-3:] for run in runs), strict=True)
    assert int(hits[0]) < int(hits[1]) == int(hits[2]) == int(hits[3])
    assert all(len(set(found)) == 1 for found in results), results
