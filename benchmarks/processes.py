"""Virtual CPU devices, of one process or of several that talk over gloo, one part each."""

from __future__ import annotations

import os
import subprocess
import sys

import jax

import gshard
from benchmarks.groups import ADDRESS, RANK, SIZE, free_address, rank, size


def on_cpu(devices: int) -> None:
    """This process has so many virtual CPU devices, also where JAX would use accelerators."""
    jax.config.update("jax_platforms", "cpu")
    gshard.virtual_devices(devices)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of the first devices.

    Raises:
      SystemExit: there are fewer.
    """
    found = jax.devices()[:devices]
    if len(found) < devices:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        raise SystemExit(f"{devices} devices are needed, and JAX has {len(found)}. Give {flag}.")
    return gshard.make_mesh(devices=found)


def connect(devices: int) -> None:
    """This process of a group gets its part of so many virtual devices, and meets the others."""
    on_cpu(devices // size())
    gshard.distributed.initialize(os.environ[ADDRESS], size(), rank())


def in_processes(module: str, processes: int, devices: int) -> bool:
    """Whether this process is to work; the one that was called starts the others and waits.

    Args:
      module: the benchmark, run again with the same arguments.
      processes: 1 for this one alone.
      devices: virtual devices of all processes together.
    """
    if processes == 1:
        on_cpu(devices)
        return True
    if devices % processes:
        raise SystemExit(f"--devices {devices} does not divide over --processes {processes}.")
    if RANK in os.environ:
        connect(devices)
        return True
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    env = os.environ | {SIZE: str(processes), ADDRESS: free_address()}
    ranks = [subprocess.Popen(command, env=env | {RANK: str(i)}) for i in range(processes)]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}.")
    return False


def is_first() -> bool:
    """Whether this process prints."""
    return jax.process_index() == 0
