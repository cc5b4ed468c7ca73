"""Checks that JAX starts, uses every device of the machine, and computes correctly on them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

from gshard.cli.doctor.check import Answer, Check, ask, size
from gshard.cli.doctor.machine import Hardware, to_install, visible
from gshard.distributed import env_vars

TOLERANCE = 1e-5
_VIRTUAL = 4  # CPU devices for the numbers, where there is one device
_PLATFORMS = {"nvidia": "gpu", "amd": "gpu", "tpu": "tpu"}  # JAX's names
_NAMES = {"nvidia": "NVIDIA GPU", "amd": "AMD GPU", "tpu": "TPU chip"}
_SLOW = "see that no other program holds the devices; --timeout gives it more seconds"


def started(here: Hardware, seconds: float) -> tuple[list[dict[str, Any]], list[Check]]:
    """Returns the devices that JAX uses (none if it does not start), and checks of them."""
    answer = ask("devices", seconds)
    if answer.result is None:
        return [], [Check("devices", "fail", _said(answer), _fix_start(answer, here))]
    found = answer.result["devices"]
    checks = [Check("devices", "ok", _in_words(found))]
    for kind in _PLATFORMS:
        count = getattr(here, kind)
        used = sum(device["platform"] == _PLATFORMS[kind] for device in found)
        if kind == "tpu":  # a chip may be one device or two
            used = count if used else 0
        if used < count:
            checks.append(unused(kind, used, here, os.environ, answer.log))
    return found, [*checks, _mesh(answer.result)]


def _in_words(found: list[dict[str, Any]]) -> str:
    """Describes devices, such as `8 gpu (NVIDIA H100, 75.0 GiB each)`."""
    kinds = Counter((d["platform"], d["kind"], d["memory"]) for d in found)
    parts = []
    for (platform, kind, memory), count in kinds.items():
        about = [kind] if kind != platform else []
        about += [f"{size(memory)} each"] if memory else []
        parts.append(f"{count} {platform}" + (f" ({', '.join(about)})" if about else ""))
    return ", ".join(parts)


def _mesh(found: dict[str, Any]) -> Check:
    count = len(found["devices"])
    axes = ", ".join(f"{axis}={length}" for axis, length in found["mesh"].items())
    if found["idle"]:
        fix = "pass these devices too: gshard.make_mesh(devices=...)"
        said = f"gshard.make_mesh() has {axes}, and leaves idle: {', '.join(found['idle'])}"
        return Check("mesh", "warn", said, fix)
    every = "the one device" if count == 1 else f"all {count} devices"
    return Check("mesh", "ok", f"gshard.make_mesh() has {axes}: {every}")


def unused(kind: str, used: int, here: Hardware, told: Mapping[str, str], log: str = "") -> Check:
    """Checks for devices of the machine that JAX does not use.

    Args:
      kind: a field of `Hardware`.
      used: how many devices of this kind JAX uses.
      here: the machine.
      told: the environment variables.
      log: the messages of JAX when it started.
    """
    count = getattr(here, kind)
    said = f"JAX uses {used} of {count} {_NAMES[kind]}{'s' if count > 1 else ''}"
    platforms = told.get("JAX_PLATFORMS") or told.get("JAX_PLATFORM_NAME")
    if platforms and not used:
        return Check("unused device", "warn", f"{said}: JAX_PLATFORMS={platforms}",
                     "unset JAX_PLATFORMS")  # fmt: skip
    if name := visible(told) if kind != "tpu" else "":
        if env_vars.LOCAL_PROCESS_ID in told or "SLURM_LOCALID" in told:
            return Check("devices of this process", "ok", f"{said}: {name}={told[name]}")
        return Check("unused device", "warn", f"{said}: {name}={told[name]}", f"unset {name}")
    if kind == "nvidia" and used:
        fix = "see `nvidia-smi` and `dmesg` for the others: one may be broken, or in MIG mode"
        return Check("unused device", "fail", said, fix)
    return Check("unused device", "fail", f"{said}{': ' if log else ''}{log}", _pip(kind, here))


def _pip(kind: str, here: Hardware) -> str:
    try:
        extras = metadata.metadata("jax").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        extras = []
    return to_install(kind, here, jax.__version__, extras)


def _said(answer: Answer) -> str:
    more = f": {answer.log}" if answer.log and answer.log not in answer.trouble else ""
    return f"{answer.trouble}{more}"


def _fix_start(answer: Answer, here: Hardware) -> str:
    if "XLA_FLAGS" in answer.log:
        return "take the flag out of XLA_FLAGS, or write it right: flags differ between versions"
    if platforms := os.environ.get("JAX_PLATFORMS"):
        kinds = {"cuda": "nvidia", "gpu": "nvidia", "rocm": "amd", "tpu": "tpu"}
        lines = {_pip(kinds[p], here) for p in platforms.split(",") if p in kinds}
        plugin = f", or install its plugin: {' '.join(sorted(lines))}" if lines else ""
        return f"JAX_PLATFORMS={platforms}: unset it{plugin}"
    if "timed out" in answer.trouble:
        return _SLOW
    return "python -c 'import jax; jax.devices()' says more"


def numbers(devices: list[dict[str, Any]], seconds: float) -> list[Check]:
    """Checks that a train step at every level matches single-device training."""
    few = len(devices) == 1 and devices[0]["platform"] == "cpu"
    answer = ask("numbers", seconds, virtual=_VIRTUAL if few else 0)
    if answer.result is None:
        return [Check("train step", "fail", _said(answer), _SLOW)]
    count = answer.result["devices"]
    where = f"{count} {answer.result['platform']} device{'s' if count > 1 else ''}"
    return [judged(answer.result["levels"], where + " (virtual)" * (few and count > 1))]


def judged(found: Mapping[str, float], where: str) -> Check:
    """Checks that each level differs from single-device training only by rounding."""
    name = "train step"
    wrong = [f"{level} by {error:.1g}" for level, error in found.items() if not error <= TOLERANCE]
    if wrong:
        fix = "another version of JAX, jaxlib or of the driver; then report it to gshard"
        said = f"on {where} the parameters are not those of one device: {', '.join(wrong)}"
        return Check(name, "fail", said, fix)
    said = f"{', '.join(found)} on {where}: one device's numbers to {max(found.values()):.0e}"
    return Check(name, "ok", said)


def gloo(seconds: float) -> list[Check]:
    """Checks that two CPU processes of this machine can join and compute a sum."""
    name, answer = "two processes (Gloo)", ask("gloo", seconds, patience=max(1, int(seconds)))
    if answer.result is None:
        fix = "see `own name` and `loopback` above: the processes talk at this machine's addresses"
        return [Check(name, "fail", _said(answer), fix)]
    sums = answer.result["sums"]
    if sums != [3.0, 3.0]:
        return [Check(name, "fail", f"1 + 2 gave {sums}", "reinstall jaxlib")]
    return [Check(name, "ok", "joined and added up right")]


def nccl(devices: list[dict[str, Any]], seconds: float) -> list[Check]:
    """Checks a sum over the GPUs of this machine, if there are several."""
    if sum(device["platform"] == "gpu" for device in devices) < 2:
        return []
    name, answer = "all GPUs (NCCL)", ask("nccl", seconds)
    fix = "run it with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1; see /dev/shm above"
    if answer.result is None:
        return [Check(name, "fail", _said(answer), fix)]
    if not answer.result["right"]:
        return [Check(name, "fail", "the sum over all GPUs is wrong", fix)]
    speed = answer.result["bytes_per_second"] / 1e9
    return [Check(name, "ok", f"{answer.result['devices']} added up right, {speed:,.1f} GB/s each")]
