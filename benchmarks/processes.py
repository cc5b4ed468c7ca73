"""The same benchmark in several processes that talk over gloo, one part of the devices each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax

import gshard

_RANK, _ADDRESS = "BENCHMARK_RANK", "BENCHMARK_ADDRESS"


def in_processes(module: str, processes: int, devices: int) -> bool:
    """Whether this process is to work; the one that was called starts the others and waits.

    Args:
      module: the benchmark, run again with the same arguments.
      processes: 1 for this one alone.
      devices: virtual devices of all processes together.
    """
    gshard.virtual_devices(devices // processes)
    if processes == 1:
        return True
    if devices % processes:
        raise SystemExit(f"--devices {devices} does not divide over --processes {processes}.")
    if _RANK in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ[_ADDRESS], processes, int(os.environ[_RANK]))
        return True
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env=os.environ | {_RANK: str(rank), _ADDRESS: address})
        for rank in range(processes)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}.")
    return False


def is_first() -> bool:
    """Whether this process prints."""
    return jax.process_index() == 0
