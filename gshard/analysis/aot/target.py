"""Machines by name, such as `h100:32x8`, `tpu-v5e:16x16` and `cpu:8`.

A GPU machine is HOSTSxGPUS, the GPUs of one host at most 8, and `h100:8` is one host; a TPU slice
is named by its torus of chips, as its maker does; `cpu:8` is eight virtual devices of this
computer.
"""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

from gshard._util.chips import CHIPS, Chip, computer_memory
from gshard._util.errors import GShardError, did_you_mean
from gshard._util.version import install_command

# A larger slice of v5e or v6e has a description, and its compilation aborts the process.
_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_TPUS = {  # name: the name that libtpu knows, largest torus (None: one of _FLAT)
    "tpu-v4": ("v4", (16, 16, 16)),
    "tpu-v5e": ("v5e", None),
    "tpu-v5p": ("v5p", (16, 16, 24)),
    "tpu-v6e": ("v6e", None),
    "tpu-7x": ("tpu7x", (16, 16, 36)),
}
_CHIPS_PER_TPU_HOST = 4  # as libtpu describes slices; a v5e or v6e host may hold 8


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
      kind: its chip, a key of `CHIPS`.
      sizes: (devices,) of virtual CPU devices, (hosts, GPUs of each), or a TPU slice's torus.
    """

    kind: str
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        """Its name, such as `h100:32x8`."""
        return f"{self.kind}:{_joined(self.sizes)}"

    @property
    def chip(self) -> Chip:
        """The known properties of one of its devices."""
        return CHIPS[self.kind]

    @property
    def devices(self) -> int:
        """How many devices JAX sees."""
        return math.prod(self.sizes) * self.chip.per_chip

    @property
    def memory(self) -> int:
        """Bytes that arrays and programs of one device can use.

        Virtual CPU devices have equal shares of this computer's memory.
        """
        usable = self.chip.usable
        return computer_memory() // self.devices if usable is None else usable

    @property
    def devices_per_host(self) -> int:
        """How many of them one host has, at most."""
        if self.platform == "gpu":
            return self.sizes[1]
        if self.platform == "tpu":
            return min(self.devices, _CHIPS_PER_TPU_HOST * self.chip.per_chip)
        return self.devices

    @property
    def devices_per_node(self) -> int:
        """How many of them NVLink joins, or the interconnect of a slice."""
        return self.devices_per_host if self.platform == "gpu" else self.devices

    @property
    def hosts(self) -> int:
        """How many computers its devices are attached to."""
        return self.devices // self.devices_per_host

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return "gpu" if self.kind in GPUS else "tpu" if self.kind in _TPUS else "cpu"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process that compiles for it."""
        more = {"JAX_PLATFORMS": "cpu"}
        if self.platform == "cpu":
            more["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={self.devices}"
        if self.platform == "tpu":  # no TPU host to ask, and other processes may use libtpu too
            more |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
            more |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        return more

    def check_compiler(self) -> None:
        """Raises a `GShardError` with the extra to install if its compiler is not there."""
        compilers = {"gpu": ("jax_plugins.xla_cuda13", "aot-gpu"), "tpu": ("libtpu", "aot-tpu")}
        if self.platform not in compilers:
            return
        module, extra = compilers[self.platform]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent is missing
            found = None
        if found is None:
            raise GShardError(
                f"the compiler for target {self.text!r} is not installed: "
                f"{install_command(extra)}. Prefer an environment of its own: JAX looks for such "
                "devices in every program."
            )

    def described_devices(self) -> list[Any]:
        """Returns its devices, in the order in which the compiler has them.

        Raises:
          GShardError: its compiler is not installed; or, of virtual CPU devices, this process was
            not started with `environment` and has fewer.
        """
        import jax
        from jax.experimental import topologies

        if self.platform == "cpu":
            devices = jax.devices("cpu")
            if len(devices) < self.devices:
                raise GShardError(
                    f"target {self.text!r} needs {self.devices} virtual devices, and this process "
                    f"has {len(devices)}: start it with XLA_FLAGS={self.environment['XLA_FLAGS']}"
                )
            return devices[: self.devices]
        self.check_compiler()
        if self.platform == "gpu":
            return topologies.get_topology_desc(
                platform="cuda",
                target_config=gpu_config(self.chip),
                topology=f"1x{_joined(self.sizes)}",
            ).devices
        name = f"{_TPUS[self.kind][0]}:{_joined(self.sizes)}"
        # The two cores of a v4 chip are one device, as in practice.
        more = {"chip_config_name": "megacore"} if self.kind == "tpu-v4" else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


def parse_target(text: str) -> Target:
    """Reads a target such as `h100:32x8`.

    Raises:
      GShardError: one line that says what is possible.
    """
    kind, _, rest = text.strip().lower().partition(":")
    if kind not in CHIPS:
        raise GShardError(
            f"target {text!r} is unknown.{did_you_mean(kind, CHIPS)} "
            f"Choose one of {', '.join(CHIPS)}."
        )
    written = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", rest)
    sizes = tuple(map(int, rest.split("x"))) if written else ()
    if kind in GPUS:
        sizes = (1, *sizes) if len(sizes) == 1 else sizes
        exists = len(sizes) == 2 and sizes[1] <= 8
        possible = f"{kind}:HOSTSxGPUS with at most 8 GPUs in a host, such as {kind}:32x8"
    elif kind not in _TPUS:
        exists = len(sizes) == 1 and 2 <= sizes[0] <= 64
        possible = "cpu:2 to cpu:64, the number of virtual devices"
    elif (largest := _TPUS[kind][1]) is None:
        exists = _joined(sizes) in _FLAT
        possible = f"{kind} has slices of {', '.join(_FLAT)} chips"
    else:
        within = all(
            n % 4 == 0 and n <= most for n, most in zip(sorted(sizes), largest, strict=False)
        )
        exists = _joined(sizes) in _CUBES or (len(sizes) == 3 and within)
        possible = (
            f"{kind} has slices of {', '.join(_CUBES)} chips, and multiples of 4 up to "
            f"{_joined(largest)}"
        )
    if not exists:
        raise GShardError(
            f"target {text!r} {'cannot be' if written else 'needs sizes'}: {possible}."
        )
    return Target(kind, sizes)


def _joined(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


_HOPPER = {"major": 9, "cores": 132, "fpus": 128, "cache": 52428800, "clock": 1.98}
_MULTIPROCESSORS = {  # and the chips' L2 cache in bytes, and clock in GHz
    "a100": {"major": 8, "cores": 108, "fpus": 64, "cache": 41943040, "clock": 1.41},
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": {"major": 10, "cores": 148, "fpus": 128, "cache": 132644864, "clock": 1.965},
}
_SHARED = {8: 163 * 1024, 9: 227 * 1024, 10: 227 * 1024}  # bytes for a block, by generation
_TEXT = """
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

GPUS = tuple(_MULTIPROCESSORS)


def gpu_config(chip: Chip) -> str:
    """The text proto `stream_executor.GpuTargetConfigProto` of one of `GPUS`."""
    parts = _MULTIPROCESSORS[chip.name]
    shared = _SHARED[int(parts["major"])]
    return _TEXT.format(
        **parts,
        name=chip.title,
        memory=chip.memory,
        bandwidth=int(chip.memory_bandwidth),
        shared=shared,
        shared_per_core=shared + 1024,
    )
