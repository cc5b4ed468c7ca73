"""What is known of a device at hand."""

from __future__ import annotations

import os
from typing import Any

from gshard._util.cgroup import cgroup_limits
from gshard._util.chips import CHIPS, Chip

# `device_kind` of TPUs in JAX; that of a GPU is its title.
_TPU_KINDS = {
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v5p": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
    "TPU7x": "tpu-7x",
}


def chip_of(device: Any) -> Chip | None:
    """The chip of a JAX device; None of one that the table does not have."""
    if device.platform == "cpu":
        return CHIPS["cpu"]
    kind = _TPU_KINDS.get(device.device_kind)
    titles = {chip.title: chip for chip in CHIPS.values()}
    return CHIPS[kind] if kind else titles.get(device.device_kind)


def memory_of(device: Any) -> int | None:
    """Bytes that arrays and programs of a device can use; None where nothing says it.

    A virtual CPU device has an equal share of the computer's memory.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    if device.platform == "cpu":
        of_computer = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        of_group, _ = cgroup_limits()  # of a container
        return int(min(of_computer, of_group or of_computer)) // len(device.client.local_devices())
    chip = chip_of(device)
    return None if chip is None else chip.usable
