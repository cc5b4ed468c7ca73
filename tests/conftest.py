"""Eight virtual CPU devices for every test, set before JAX starts."""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = 8
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    # Eight devices share few cores with other work: one of them may be late by more than the 40 s
    # after which XLA's collectives end the whole process.
    "--xla_cpu_collective_call_terminate_timeout_seconds=200",
)

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_ENABLE_X64", None)
# One more compilation for each of thousands of steps; tests/train/test_loss_check.py turns it on.
os.environ["GSHARD_CHECK_LOSS"] = "0"

import jax  # noqa: E402

# Compiled programs are kept between runs: the key holds the program, the flags and the versions,
# and a program that comes from the cache has the same text and the same memory figures.
# Set here and not in the environment, so that the processes a test starts compile for themselves.
# One folder for each worker: JAX may read an entry that another process has half written, which
# ends in a warning, or in a crash of XLA.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax" / _WORKER)
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
