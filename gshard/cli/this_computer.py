"""The devices of this computer for a command: its accelerators, or virtual ones."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError
from gshard.analysis.config import Config
from gshard.sharding.mesh import make_mesh, virtual_devices

MOST_VIRTUAL = 64  # every one is a thread, and the whole program is compiled for all of them
_CGROUP = Path("/sys/fs/cgroup")


def mesh_here(config: Config, command: str) -> Mesh:
    """The mesh of a config on this computer; nothing may have used JAX before.

    Accelerators where there are as many as asked for, else virtual devices of the CPU.

    Raises:
      GShardError: there is no number, or it is too large; `command` begins the message.
    """
    count = config.device_count()
    if count <= MOST_VIRTUAL:
        virtual_devices(count)  # has no effect on accelerators
    given = jax.devices()
    if given[0].platform == "cpu" or len(given) < count:
        if count > MOST_VIRTUAL:
            raise GShardError(
                f"{command} works on this computer's devices, and {count} virtual ones are too "
                f"many (at most {MOST_VIRTUAL}). Give --devices {MOST_VIRTUAL} or less; gshard "
                "plan --target compiles for real machines of any size."
            )
        given = jax.devices("cpu")
    return make_mesh(replica=config.replica, devices=given[:count])


def free_memory(mesh: Mesh) -> int | None:
    """Bytes that are free for all devices of a mesh together; None where nobody says.

    Those of accelerators are their own, those of virtual devices the computer's.
    """
    devices = mesh.devices.flat
    if devices[0].platform == "cpu":
        return min(filter(None, (_free_pages(), _free_in_group())), default=None)
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in x for x in stats):
        return None
    return len(stats) * min(x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats)


def _free_pages() -> int | None:
    with contextlib.suppress(OSError):  # Linux: what can be had without swapping
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_in_group() -> int | None:
    """Of a container's memory, where it has a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        return max(limit - int((_CGROUP / "memory.current").read_text()), 1)
    return None
