"""Machines that a program can be compiled for without having them, by names such as `v5e:16x16`.

A GPU machine is HOSTSxGPUS, the GPUs of one host at most 8; a TPU slice is named as its maker names
the torus; `cpu:8` is eight virtual devices of this computer.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

# Cores, and what differs of `gpu_device_info` between the chips: XLA's cost model and code depend
# on these, and a wrong memory size would change what is rematerialised.
_GPUS = {
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "major": 8,
        "cores": 108,
        "fpus": 64,
        "bandwidth": 2039000000000,
        "cache": 41943040,
        "clock": 1.41,
        "memory": 85094825984,
        "shared": 163 * 1024,
    },
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "cores": 132,
        "fpus": 128,
        "bandwidth": 3352320000000,
        "cache": 52428800,
        "clock": 1.98,
        "memory": 84929347584,
        "shared": 227 * 1024,
    },
    "b200": {
        "name": "NVIDIA B200",
        "major": 10,
        "cores": 148,
        "fpus": 128,
        "bandwidth": 8000000000000,
        "cache": 132644864,
        "clock": 1.965,
        "memory": 191500000000,
        "shared": 227 * 1024,
    },
}
_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared}
  core_count: {cores} fpus_per_core: {fpus} memory_bandwidth: {bandwidth}
  l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{name}"
"""

# A larger slice has a description, and its compilation aborts the process.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_TPUS = {  # name: the name that libtpu knows, largest torus (None: one of _FLAT), devices per chip
    "tpu-v4": ("v4", (16, 16, 16), 1),
    "tpu-v5e": ("v5e", None, 1),
    "tpu-v5p": ("v5p", (16, 16, 24), 1),
    "tpu-v6e": ("v6e", None, 1),
    "tpu-7x": ("tpu7x", (16, 16, 36), 2),
}


class BenchmarkError(ValueError):
    """What cannot be, in one line that says what is possible."""


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
      text: as it was named.
      kind: `cpu`, or a key of the tables above.
      sizes: as named, such as (16, 16).
    """

    text: str
    kind: str
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        per_chip = _TPUS[self.kind][2] if self.kind in _TPUS else 1
        return math.prod(self.sizes) * per_chip

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return "gpu" if self.kind in _GPUS else self.kind.split("-")[0]

    @property
    def environment(self) -> dict[str, str]:
        """What a process that compiles for it needs to be started with."""
        more = {"JAX_PLATFORMS": "cpu"}
        if self.platform == "cpu":
            more["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={self.devices}"
        if self.platform == "tpu":  # no TPU host to ask, and other processes may use libtpu too
            more |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
            more |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        return more

    def described_devices(self) -> list[Any]:
        """Its devices, in the order in which the compiler has them.

        Raises:
          BenchmarkError: the compiler for it is not installed.
        """
        import jax
        from jax.experimental import topologies

        if self.platform == "cpu":
            return jax.devices()
        if self.platform == "gpu":
            _need("jax_plugins.xla_cuda13", "aot-gpu")
            sizes = "x".join(map(str, self.sizes))
            return topologies.get_topology_desc(
                platform="cuda", target_config=gpu_config(self.kind), topology=f"1x{sizes}"
            ).devices
        _need("libtpu", "aot-tpu")
        name = f"{_TPUS[self.kind][0]}:{'x'.join(map(str, self.sizes))}"
        # The two cores of a v4 chip are one device, as in practice.
        more = {"chip_config_name": "megacore"} if self.kind == "tpu-v4" else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


def parse_target(text: str) -> Target:
    """Reads a target such as `h100:32x8`.

    Raises:
      BenchmarkError: one line that says what is possible.
    """
    kind, _, rest = text.partition(":")
    kinds = ["cpu", *_GPUS, *_TPUS]
    if kind not in kinds:
        close = difflib.get_close_matches(kind, kinds, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise BenchmarkError(f"target {text!r} is unknown.{hint} Choose one of {', '.join(kinds)}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", rest):
        raise BenchmarkError(f"target {text!r} needs sizes: {_possible(kind)}.")
    sizes = tuple(map(int, rest.split("x")))
    if not _fits(kind, sizes):
        raise BenchmarkError(f"target {text!r} cannot be: {_possible(kind)}.")
    return Target(text, kind, sizes)


def gpu_config(kind: str) -> str:
    """The text proto that tells XLA of a GPU that is not there."""
    gpu = _GPUS[kind]
    return _GPU_CONFIG.format(**gpu, shared_per_core=gpu["shared"] + 1024)


def _fits(kind: str, sizes: tuple[int, ...]) -> bool:
    if kind == "cpu":
        return len(sizes) == 1 and 2 <= sizes[0] <= 64
    if kind in _GPUS:
        return len(sizes) == 2 and sizes[1] <= 8 and math.prod(sizes) > 1
    largest = _TPUS[kind][1]
    text = "x".join(map(str, sizes))
    if largest is None:
        return text in _FLAT[1:]
    in_cubes = len(sizes) == 3 and all(n % 4 == 0 for n in sizes)
    within = all(n <= most for n, most in zip(sorted(sizes), largest, strict=False))
    return text in _CUBES or (in_cubes and within)


def _possible(kind: str) -> str:
    if kind == "cpu":
        return "cpu:2 to cpu:64, the number of virtual devices"
    if kind in _GPUS:
        return f"{kind}:HOSTSxGPUS with at most 8 GPUs in a host, such as {kind}:32x8"
    largest = _TPUS[kind][1]
    if largest is None:
        return f"{kind} has slices of {', '.join(_FLAT[1:])} chips"
    most = "x".join(map(str, largest))
    return f"{kind} has slices of {', '.join(_CUBES)} chips, and multiples of 4 up to {most}"


def _need(module: str, extra: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        found = None
    if found is None:
        raise BenchmarkError(
            f"the compiler for this target is not installed: pip install 'gshard[{extra}]'."
        )
