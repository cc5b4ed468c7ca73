"""Data sheets of accelerators: memory, arithmetic, and bandwidth to memory, devices and hosts.

All figures are those of one JAX device (a GPU, a TPU chip, half a TPU7x chip), in bytes, bytes/s of
one direction, and FLOP/s without sparsity. GB is 1e9 bytes, GiB is 2**30.

Sources:
  [nv]: NVIDIA's data sheets: A100 80GB SXM, H100 SXM5, H200 SXM, HGX B200; and of DGX A100, H100,
    H200 and B200 for networks, PCIe and host memory.
  [xla]: openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb: what CUDA reports.
  [tpu]: docs.cloud.google.com/tpu/docs: v4, v5e, v5p, v6e, tpu7x.
  [book]: jax-ml.github.io/scaling-book, "How to Think About TPUs", tables of chips and links.
  [libtpu]: "available HBM" in the error of libtpu 0.0.52 for a program that is too large; it has
    two decimals, so the last 5 MiB are not known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gshard._util.cgroup import memory_limit

_GB, _GIB, _TERA = 10**9, 2**30, 10**12

# Share of the device's memory that JAX preallocates for arrays: its default for
# XLA_PYTHON_CLIENT_MEM_FRACTION (docs.jax.dev, "GPU memory allocation").
_PREALLOCATED = 0.75
# Share of NVLink's bandwidth that collectives of 8 GPUs reach: NCCL's bus bandwidth on 8 H100 is
# 350 GB/s to gather and 360 GB/s to scatter, of 450 (github.com/NVIDIA/nccl/issues/1281).
_NCCL = 350 / 450


@dataclass(frozen=True)
class Chip:
    """One JAX device.

    Attributes:
      name: its name in a target, such as `h100`.
      title: the maker's name.
      memory: bytes that the device reports; None for a CPU, whose devices share the host's memory.
      usable: bytes of it that programs can use for arrays and temporaries, by JAX's defaults.
      bfloat16: peak FLOP/s of matrix products in bfloat16.
      float32: peak FLOP/s of matrix products in float32 at JAX's default precision: TF32 on GPUs,
        one pass of bfloat16 on TPUs.
      memory_bandwidth: bytes/s from and to its own memory.
      link: bytes/s that collectives send from a device to others of its host (NVLink), or over one
        link of the torus (ICI), which is half of what it sends along one axis in both directions.
      network: bytes/s that a device sends to other hosts (for TPUs, slices): its share of its
        host's network. An assumption, since networks are built to order.
      host_link: bytes/s between the device and its host's memory.
      host_memory: bytes of its host's memory, divided by the number of the host's devices.
      per_chip: devices of one chip, in which TPU slices are counted.
    """

    name: str
    title: str
    memory: int | None
    usable: int | None
    bfloat16: float
    float32: float
    memory_bandwidth: float
    link: float
    network: float
    host_link: float
    host_memory: float
    per_chip: int = 1


# Figures of one chip: the maker's name; bytes of memory; TFLOP/s in bfloat16 and float32; GB/s of
# its memory, a link, the network and the host link, and GB of host memory; its JAX devices.
#
# GPUs, of hosts with 8 GPUs and 2 TB of memory [nv]: memory and its bandwidth [xla] (a100, h100:
# measured on devices, within 0.02 % of it; h200: 4/3 of the `bytes_limit` of one, since JAX takes
# 75 %: 0.9 % less than [xla]); dense bfloat16 and TF32, and NVLink, half of what both
# directions have [nv]; the network is one port per GPU of 200 Gb/s (DGX A100) or 400 Gb/s (the
# others) [nv]. PCIe is what copies reach of x16: 25 of 32 GB/s in generation 4, 50 of 64 in
# generation 5.
#
# TPUs: usable memory [libtpu]; bfloat16 and memory bandwidth [tpu]; ICI of one link, one way, as
# [book] has it, nine tenths of what [tpu] says (tpu-7x: the same share of it); PCIe [book], where
# TPU7x is not known and taken as v6e. Network: [tpu] for each chip of v5p, v6e, 7x; a v5e host has
# 2 x 100 Gb/s for 8 chips [tpu], a v4 host 25 GB/s for 4 [book]. Host memory [tpu].
_FIGURES = {
    "a100": ("NVIDIA A100-SXM4-80GB", 85094825984, (312, 156), (2039, 300, 25, 25, 250), 1),
    "h100": ("NVIDIA H100 80GB HBM3", 84929347584, (989.4, 494.7), (3352.32, 450, 50, 50, 250), 1),
    "h200": ("NVIDIA H200 141GB HBM3e", 150111343957, (989.4, 494.7), (4800, 450, 50, 50, 250), 1),
    "b200": ("NVIDIA B200", 191514411008, (2250, 1100), (7672.32, 900, 50, 50, 250), 1),
    "tpu-v4": ("TPU v4", 30.75 * _GIB, (275, 275), (1200, 45, 6.25, 16, 407 / 4), 1),
    "tpu-v5e": ("TPU v5e", 15.75 * _GIB, (197, 197), (819, 45, 3.125, 15, 64 * _GIB / _GB), 1),
    "tpu-v5p": ("TPU v5p", 95.73 * _GIB, (459, 459), (2765, 90, 6.25, 15, 448 / 4), 1),
    "tpu-v6e": ("TPU v6e (Trillium)", 31.24 * _GIB, (918, 918), (1638, 90, 12.5, 32, 720 / 4), 1),
    "tpu-7x": ("TPU7x (Ironwood)", 94.74 * _GIB, (2307, 2307), (7380, 90, 12.5, 32, 960 / 4), 2),
}
CHIPS = {  # virtual devices of this computer: rough figures of one core, so that a forecast runs
    "cpu": Chip(
        name="cpu",
        title="virtual CPU device",
        memory=None,
        usable=None,
        bfloat16=5e10,
        float32=5e10,
        memory_bandwidth=1e10,
        link=5e9,
        network=1e9,
        host_link=1e10,
        host_memory=4e9,
    )
}
for _name, (_title, _memory, _tera, (_hbm, _link, *_others), _devices) in _FIGURES.items():
    _tpu = _name.startswith("tpu")
    _giga = (_hbm, _link if _tpu else _NCCL * _link, *_others)
    _rates = [x * _TERA / _devices for x in _tera] + [x * _GB / _devices for x in _giga]
    _usable = int(_memory if _tpu else _PREALLOCATED * _memory)
    CHIPS[_name] = Chip(_name, _title, int(_memory), _usable, *_rates, per_chip=_devices)

# By `device_kind` in JAX: that of a GPU is its title, that of a TPU has several spellings.
_BY_KIND = {chip.title: chip for chip in CHIPS.values()} | {
    "NVIDIA H200": CHIPS["h200"],
    "TPU v5 lite": CHIPS["tpu-v5e"],
    "TPU v5": CHIPS["tpu-v5p"],
    "TPU v6 lite": CHIPS["tpu-v6e"],
    "TPU v6e": CHIPS["tpu-v6e"],
    "TPU7x": CHIPS["tpu-7x"],
}


def chip_of(device: Any) -> Chip | None:
    """The chip of a JAX device; None for one that is not in the table."""
    return chip_of_kind("cpu" if device.platform == "cpu" else device.device_kind)


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip with this `device_kind` in JAX; None if it is not in the table."""
    return CHIPS["cpu"] if device_kind == "cpu" else _BY_KIND.get(device_kind)


def memory_of(device: Any) -> int | None:
    """Bytes that arrays and programs of a device can use; None where it is not known.

    A virtual CPU device has an equal share of the computer's memory.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    if device.platform == "cpu":
        return computer_memory() // len(device.client.local_devices())
    chip = chip_of(device)
    return None if chip is None else chip.usable


def computer_memory() -> int:
    """Bytes of memory that the processes of this computer, or of its container, can use."""
    of_computer = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(of_computer, memory_limit() or of_computer)
