"""The same benchmark in several processes that talk over gloo, one part of the devices each."""

from __future__ import annotations

import os
import subprocess
import sys

import jax

import gshard
from benchmarks.groups import ADDRESS, RANK, SIZE, free_address, rank, size


def connect(devices: int) -> None:
    """This process of a group gets its part of so many virtual devices, and meets the others."""
    gshard.virtual_devices(devices // size())
    gshard.distributed.initialize(os.environ[ADDRESS], size(), rank())


def in_processes(module: str, processes: int, devices: int) -> bool:
    """Whether this process is to work; the one that was called starts the others and waits.

    Args:
      module: the benchmark, run again with the same arguments.
      processes: 1 for this one alone.
      devices: virtual devices of all processes together.
    """
    if processes == 1:
        gshard.virtual_devices(devices)
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
