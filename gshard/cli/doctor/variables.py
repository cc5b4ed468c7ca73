"""Variables that change what JAX, XLA, NCCL and gshard do, and those that switch something off."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

import jax

from gshard._util.validation import shown
from gshard.cli.doctor.check import Check
from gshard.distributed import env_vars

FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_OURS = [name for name in vars(env_vars).values() if str(name).startswith("GSHARD_")]
# Of JAX, beside its settings.
_OF_JAX = {
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS",
}  # fmt: skip
# How near a name must be; other programs have variables that begin with JAX_ too.
_NEAR = {"GSHARD_": 0.5, "JAX_": 0.9}


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "on", "yes", "y", "t")


def _is_off(value: str) -> bool:
    return value.lower() in ("0", "false", "off", "no", "n", "f", "none")


def _leaves_out(value: str) -> bool:
    return "cuda" not in value and "gpu" not in value and "rocm" not in value and "tpu" not in value


# name -> (what it must be to be doubted, whether only where there are accelerators, what it does)
_DOUBTED: dict[str, tuple[Callable[[str], object], bool, str]] = {
    "JAX_PLATFORMS": (_leaves_out, True, "the accelerators of this machine are not used"),
    "JAX_PLATFORM_NAME": (_leaves_out, True, "the accelerators of this machine are not used"),
    "JAX_NUM_CPU_DEVICES": (bool, True, "virtual CPU devices, beside accelerators"),
    "JAX_DISABLE_JIT": (_is_on, False, "nothing is compiled: every operation runs alone, slowly"),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": (_is_on, False, "programs are compiled to be slow"),
    "JAX_DEBUG_NANS": (_is_on, False, "every result is read back and looked at: slow"),
    "JAX_DEBUG_INFS": (_is_on, False, "every result is read back and looked at: slow"),
    "JAX_ENABLE_CHECKS": (_is_on, False, "JAX checks itself at each step: slow"),
    "JAX_ENABLE_X64": (_is_on, False, "64-bit values where NumPy has them: twice the memory"),
    "JAX_ENABLE_COMPILATION_CACHE": (_is_off, False, "programs are compiled anew at every start"),
    "CUDA_VISIBLE_DEVICES": (lambda v: v.strip() in ("", "-1"), True, "no GPU is visible"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": (
        _is_off, True, "memory is taken piece by piece: it fragments, and ends late",
    ),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (
        lambda v: v == "platform", True, "each array asks the driver for memory: very slow",
    ),
    "NCCL_P2P_DISABLE": (_is_on, True, "GPUs of one machine talk through the host: slow"),
    "NCCL_SHM_DISABLE": (_is_on, True, "GPUs of one machine talk through the network: slow"),
    "NCCL_IB_DISABLE": (_is_on, True, "machines talk by TCP and not by InfiniBand: slow"),
    "CUDA_LAUNCH_BLOCKING": (_is_on, True, "the host waits for every kernel: slow"),
}  # fmt: skip
_TOLD = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICES",
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "LD_LIBRARY_PATH",
    "NCCL_SOCKET_IFNAME", "NCCL_DEBUG",
)  # fmt: skip


def variables(accelerators: int, told: Mapping[str, str]) -> list[Check]:
    """A warning for each variable that switches something off, and a line with the others.

    Args:
      accelerators: how many GPUs and TPU chips the machine has.
      told: the environment.
    """
    found = [
        Check(name, "warn", f"{shown(told[name])}: {meaning}", f"unset {name}")
        for name, (doubted, beside, meaning) in _DOUBTED.items()
        if name in told and doubted(told[name]) and (accelerators or not beside)
    ]
    forced = FORCED.search(told.get("XLA_FLAGS", ""))
    if forced and accelerators:
        what = f"{forced[0]}: virtual CPU devices, beside accelerators"
        found.append(Check("XLA_FLAGS", "warn", what, "take this flag out of XLA_FLAGS"))
    found += _misspelt(told)
    doubted = {check.name for check in found}
    rest = [
        f"{name}={shown(value)}"
        for name, value in sorted(told.items())
        if name not in doubted and (name in _TOLD or name.startswith(("JAX_", "GSHARD_")))
    ]
    return [*found, Check("variables", "ok", ", ".join(rest) or "none that changes anything")]


def _misspelt(told: Mapping[str, str]) -> list[Check]:
    """Variables that nobody reads: of gshard any, of JAX those whose names are nearly settings."""
    settings = {name.upper() for name in jax.config.values if name.startswith("jax_")} | _OF_JAX
    found = []
    for prefix, known in (("GSHARD_", _OURS), ("JAX_", settings)):
        for name in sorted(told):
            if not name.startswith(prefix) or name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR[prefix])
            if near or prefix == "GSHARD_":
                mend = f"rename it to {near[0]}, or unset it" if near else f"unset {name}"
                what = f"{shown(told[name])}: no setting has this name"
                found.append(Check(name, "warn", what, mend))
    return found
