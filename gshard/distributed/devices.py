"""Counts the GPUs of this machine without starting JAX, and assigns them to processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, shown

# The first that is set says which GPUs this process sees, and is set for those that it starts.
_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_FORCED = re.compile(r"--xla_force_host_platform_device_count=\d+")


class TooFewDevicesError(GShardError, RuntimeError):
    """Fewer devices than processes that need one each."""


def visible_gpus() -> list[str]:
    """Returns the names of the GPUs that this process sees, from its variables or the driver."""
    for name in _VISIBLE:
        if (given := os.environ.get(name)) is not None:
            return [d.strip() for d in given.split(",") if d.strip() not in ("", "-1")]
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or not (program := shutil.which("nvidia-smi")):
        return []
    found = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60)
    lines = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(lines))]


def chosen_gpus(argument: str, devices: str | Sequence[int | str] | None) -> list[str] | None:
    """Returns the devices that a user names, or None if none are named.

    Raises:
      GShardError: one is named twice, or is not among those that this process sees.
    """
    if devices is None:
        return None
    names = devices.split(",") if isinstance(devices, str) else devices
    if not isinstance(names, (list, tuple, range)):
        raise GShardError(f"{argument}={shown(devices)} must list devices, such as '0,1'.")
    found, here = [str(name).strip() for name in names], visible_gpus()
    for name in found:
        if name not in here:
            have = f"This process sees {', '.join(here)}." if here else "This process sees no GPU."
            raise GShardError(
                f"{argument}={shown(devices)}: {name or 'an empty name'} is no visible device. "
                f"{have} For virtual CPU devices say how many each process has instead."
            )
    if not found or len(set(found)) < len(found):
        raise GShardError(f"{argument}={shown(devices)}: name at least one device, each once.")
    return found


def device_shares(
    processes: int, devices: list[str] | None, virtual_devices: int | None, prefix: str = ""
) -> list[dict[str, str]]:
    """Returns the variables that give each of several processes of one machine its own devices.

    Args:
      processes: number of processes.
      devices: GPUs to split between the processes, from `chosen_gpus`; None for all visible ones.
      virtual_devices: virtual CPU devices of each process, instead of GPUs.
      prefix: prefix of the two arguments in messages, such as `--`.

    Raises:
      GShardError: the GPUs cannot be split evenly, or the number of virtual devices is wrong.
      TooFewDevicesError: this machine has GPUs, but fewer than there are processes.
    """
    if virtual_devices is not None:
        return [_virtual(f"{prefix}virtual_devices", virtual_devices)] * processes
    return _gpus(f"{prefix}devices", devices, processes)


def _gpus(argument: str, devices: list[str] | None, processes: int) -> list[dict[str, str]]:
    if devices is None:
        devices = visible_gpus()
        if not devices:
            return [{} for _ in range(processes)]
        if len(devices) < processes:
            raise TooFewDevicesError(
                f"{processes} processes need a GPU each, and this one sees {len(devices)}: "
                f"{', '.join(devices)}. Start fewer processes, or give them virtual CPU devices."
            )
    each, rest = divmod(len(devices), processes)
    if rest or not each:
        raise GShardError(
            f"{argument}={','.join(devices)} names {len(devices)} devices, which cannot be split "
            f"evenly between {processes} processes. Name a multiple of {processes}."
        )
    variable = next((name for name in _VISIBLE if name in os.environ), _VISIBLE[0])
    return [{variable: ",".join(devices[i * each : (i + 1) * each])} for i in range(processes)]


def _virtual(argument: str, count: int) -> dict[str, str]:
    count = check_integer(argument, count, 1)
    flags = _FORCED.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count), "XLA_FLAGS": flags}
