"""What XLA must be told of a GPU that is not there.

XLA's cost model and code depend on these figures, and a wrong memory size would change what is
rematerialised: it may use 80 % of it. Source: openxla/xla,
xla/backends/gpu/target_config/specs/*.txtpb.
"""

from __future__ import annotations

from gshard._util.chips import Chip

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
