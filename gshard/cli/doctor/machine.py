"""Memory, shared memory and cores of the machine, and how much of them a container leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gshard._util.cgroup import cgroup_limits, contents
from gshard.cli.doctor.check import GIB, Check, size

_LITTLE_MEMORY = GIB
_LITTLE_SHARED = GIB  # NCCL and loaders of data keep buffers there; Docker gives 64 MiB


def machine(accelerators: int, root: Path = Path("/")) -> list[Check]:
    """Memory, swap, /dev/shm and cores.

    Args:
      accelerators: how many the machine has.
      root: where `proc`, `sys` and `dev` lie.
    """
    limits = cgroup_limits(root)
    return [*_memory(limits[0], root), *_shared(accelerators, root), _cores(limits[1])]


def _memory(limit: float | None, root: Path) -> list[Check]:
    found = _lines(root / "proc/meminfo")
    if "MemTotal" not in found:
        return [Check("host memory", "ok", "this system does not say")]
    total, free = found["MemTotal"], found.get("MemAvailable", found["MemTotal"])
    said = f"{size(free)} free of {size(total)}, swap {size(found.get('SwapTotal', 0))}"
    if limit is not None and limit < total:
        said += f"; the container (cgroup) is limited to {size(limit)}"
    if min(free, limit if limit is not None else free) < _LITTLE_MEMORY:
        mend = "end other programs, or give the container more: less than 1 GiB does not start JAX"
        return [Check("host memory", "warn", said, mend)]
    return [Check("host memory", "ok", said)]


def _shared(accelerators: int, root: Path) -> list[Check]:
    folder = root / "dev/shm"
    if not folder.is_dir():
        return []
    usage = shutil.disk_usage(folder)
    said = f"{size(usage.free)} free of {size(usage.total)}"
    if accelerators > 1 and usage.free < _LITTLE_SHARED:
        mend = "NCCL needs room there: docker run --shm-size=8g, or mount an emptyDir of Memory"
        return [Check("/dev/shm", "warn", said, mend)]
    return [Check("/dev/shm", "ok", said)]


def _cores(limit: float | None) -> Check:
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = f"{here} of {os.cpu_count()}"
    if limit is not None and limit < here:
        said += f"; the container (cgroup) is limited to {limit:g}"
        mend = "XLA starts a thread for each core, and they wait for each other: give it all cores"
        return Check("CPU cores", "warn", said, mend)
    return Check("CPU cores", "ok", said)


def _lines(path: Path) -> dict[str, int]:
    """`MemTotal: 24 kB` and so on, in bytes."""
    found = {}
    for line in contents(path).splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            found[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return found
