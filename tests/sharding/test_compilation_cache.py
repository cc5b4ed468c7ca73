"""JAX's compilation cache on CPU devices, where XLA loses the order of collectives."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from tests.processes import run_together

# LAMB at zero3 gathers in a loop, and beside it.
SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import gshard
gshard.virtual_devices(5)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
shapes = {"stack": (4, 10, 10), "odd": (10, 7), "bias": (7,), "scale": ()}
params = {k: np.ones(s, np.float32) / 8 for k, s in shapes.items()}

def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["stack"])
    return jnp.mean((x @ params["odd"] * params["scale"] + params["bias"]) ** 2)

state, plan = gshard.shard_train_state(
    (params, optax.lamb(0.01)), gshard.make_mesh(), "zero3", min_shard_size=16,
    scan_axes={"^stack$": 0},
)
step = gshard.make_train_step(loss, plan)
for i in range(50):
    state, metrics = step(state, np.random.default_rng(i).normal(size=(40, 10)).astype("f4"))
print("loss", float(metrics["loss"]))
"""


def sharded(devices):
    params = {"w": jnp.ones((8, 8))}
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=16)


@pytest.fixture
def cache(tmp_path):
    """JAX's cache in a folder for the time of the test, and how to turn it off."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path))
    jax.config.update(names[1], True)
    yield lambda: jax.config.update(names[1], False)
    for name, value in before.items():
        jax.config.update(name, value)


def test_it_is_warned_of_on_several_cpu_devices(cache):
    with pytest.warns(gshard.GShardWarning, match="JAX_ENABLE_COMPILATION_CACHE=false"):
        sharded(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(1)
        cache()
        sharded(2)


@pytest.mark.slow
def test_a_program_from_the_cache_fails_as_the_warning_says(tmp_path):
    """When this test fails, XLA keeps the order and the warning can go."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(tmp_path / "script.py"), str(tmp_path / "cache")]
    soon = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=10"}
    first, second = (run_together(tmp_path, [command], [soon])[0] for _ in range(2))
    assert first.code == 0 and "loss" in first.said, first
    assert "JAX's compilation cache is on" in first.said
    assert second.code != 0 and "rendezvous" in second.said, second
