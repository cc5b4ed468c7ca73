"""Checks the versions of packages that gshard and JAX require, and environment variables.

All bounds come from the metadata of the installed packages, so that none is written twice.
"""

from __future__ import annotations

import difflib
import operator
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Literal

import jax

from gshard._util.validation import shown
from gshard.cli.doctor.machine import Check
from gshard.distributed import env_vars
from gshard.train.loss_check import VARIABLE as CHECK_LOSS

_PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
_REQUIRING = "gshard", "jax", "flax", "optax", "orbax-checkpoint"
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)|libtpu")
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(>=|<=|==|>|<)([\d.]+?)(\.\*)?(?:,|$)")
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq,
            ">": operator.gt, "<": operator.lt}  # fmt: skip


def check_versions() -> list[Check]:
    """Checks gshard, Python, the packages, and the plugins of JAX."""
    if _version("gshard") is None:
        said = "on the path, but not installed: its requirements are unknown"
        return [Check("gshard", "warn", said, "run `pip install -e .` in its folder")]
    floor = metadata.metadata("gshard")["Requires-Python"]
    fix = f"make an environment with Python {floor}"
    python = _compared("Python", platform.python_version(), {"gshard": floor}, fix)
    names = {_normal(d.metadata["Name"] or "") for d in metadata.distributions()}
    plugins = sorted(filter(_PLUGIN.fullmatch, names))
    own = Check("gshard", "ok", str(_version("gshard")))
    return [own, python, *map(package, _PACKAGES), *map(_plugin, plugins)]


def package(name: str) -> Check:
    """Checks the version of a package against what gshard and the other packages require."""
    asked = {
        who: what
        for who in _REQUIRING
        for one, what, marker in _requirements(who)
        if one == name and what and not marker
    }
    here, fix = _version(name), f'pip install -U "{name}{",".join(asked.values())}"'
    if here is None:
        said = "; ".join(["not installed", *(f"{who} asks for {x}" for who, x in asked.items())])
        return Check(name, "fail", said, fix)
    return _compared(name, here, asked, fix)


def _plugin(name: str) -> Check:
    """Checks a plugin of JAX: JAX ignores a plugin of another version than it requires."""
    asked = ",".join(x for one, x, marker in _requirements("jax") if one == name and marker)
    if name.endswith("pjrt"):
        asked = f"=={_version(name.replace('pjrt', 'plugin'))}"
    extra = name.removeprefix("jax-").split("-")[0].replace("libtpu", "tpu")
    fix = f'pip install -U "jax[{extra}]=={_version("jax")}"'
    return _compared(name, _version(name) or "", {"jax": asked}, fix, "warn")


def _compared(
    name: str, here: str, asked: Mapping[str, str], fix: str, bad: Literal["warn", "fail"] = "fail"
) -> Check:
    for who, what in asked.items():
        if not _met(here, what):
            return Check(name, bad, f"{here}; {who} asks for {name}{what}", fix)
    return Check(name, "ok", here)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str) -> list[tuple[str, str, str]]:
    """Returns (name, versions, marker) of each requirement of a package."""
    lines = (metadata.requires(name) or []) if _version(name) else []
    found = [match.groups("") for line in lines if (match := _REQUIREMENT.match(line))]
    return [(_normal(n), what.replace(" ", ""), marker.strip()) for n, what, marker in found]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _met(version: str, specifier: str) -> bool:
    """Whether a version matches a specifier; parts of unknown forms are ignored."""
    for compare, bound, any_rest in _BOUND.findall(specifier):
        here, there = _numbers(version), _numbers(bound)
        width = len(there) if any_rest else max(len(here), len(there))
        here, there = ((*x, *[0] * width)[:width] for x in (here, there))
        if not _COMPARE[compare](here, there):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the release of a version: `(0, 10, 2)` of `0.10.2.dev1+cuda`."""
    return tuple(map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", version))))


_ON, _OFF = r"1|true|on|yes|y|t", r"0|false|off|no|n|f|none"
_VIRTUAL = "makes virtual CPU devices in addition to the accelerators"
# names, doubtful values, whether only with accelerators, what they do
_DOUBTED = (
    ("JAX_DISABLE_JIT", _ON, False, "nothing is compiled: every operation runs alone, slowly"),
    ("JAX_DISABLE_MOST_OPTIMIZATIONS", _ON, False, "compiled programs are slow"),
    ("JAX_DEBUG_(NANS|INFS)|JAX_ENABLE_CHECKS", _ON, False, "every result is checked: slow"),
    ("JAX_ENABLE_X64", _ON, False, "64-bit values where NumPy has them: twice the memory"),
    ("JAX_ENABLE_COMPILATION_CACHE", _OFF, False, "programs are recompiled at every start"),
    ("JAX_PLATFORM(S|_NAME)", "(?!.*(cuda|gpu|rocm|tpu)).+", True, "no accelerator is used"),
    ("JAX_NUM_CPU_DEVICES", ".+", True, _VIRTUAL),
    ("XLA_FLAGS", r".*--xla_force_host_platform_device_count=\d.*", True, _VIRTUAL),
    ("CUDA_VISIBLE_DEVICES", r"\s*(-1)?\s*", True, "no GPU is visible"),
    ("XLA_PYTHON_CLIENT_PREALLOCATE", _OFF, True, "memory is allocated on demand, and fragments"),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", True, "every allocation asks the driver: slow"),
    ("NCCL_(P2P|SHM|IB)_DISABLE", _ON, True, "GPUs communicate by a slower path"),
    ("CUDA_LAUNCH_BLOCKING", _ON, True, "the host waits for every kernel: slow"),
)
_LISTED = re.compile("(JAX|GSHARD|XLA|LIBTPU|NCCL)_.*|.*_VISIBLE_DEVICES|LD_LIBRARY_PATH")
# Variables of JAX in addition to its settings.
_OF_JAX = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"


def variables(accelerators: int, environment: Mapping[str, str]) -> list[Check]:
    """Warns of each variable that turns something off or is misspelt, and lists the others."""
    found = [
        Check(name, "warn", f"{shown(value)}: {meaning}", f"unset {name}, or this value of it")
        for names, doubted, accelerated, meaning in _DOUBTED
        for name, value in environment.items()
        if (accelerators or not accelerated)
        and re.fullmatch(names, name)
        and re.fullmatch(doubted, value, re.IGNORECASE)
    ]
    found += _misspelt(environment)
    warned = {check.name for check in found}
    rest = [
        f"{name}={shown(value)}"
        for name, value in sorted(environment.items())
        if name not in warned and _LISTED.fullmatch(name)
    ]
    return [*found, Check("variables", "ok", ", ".join(rest) or "none that changes anything")]


def _misspelt(environment: Mapping[str, str]) -> list[Check]:
    """Checks for variables that nothing reads: gshard's, and near misses of JAX's settings."""
    ours = [name for name in vars(env_vars).values() if str(name).startswith("GSHARD_")]
    settings = [name.upper() for name in jax.config.values if name.startswith("jax_")]
    known = [CHECK_LOSS, *ours, *_OF_JAX, *settings]
    found = []
    for name in sorted(environment):
        if name in known or not name.startswith(("GSHARD_", "JAX_")):
            continue
        # It must be very similar: other programs also have variables that begin with JAX_.
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        if near or name.startswith("GSHARD_"):
            said = f"{shown(environment[name])}: no setting has this name"
            fix = f"rename it to {near[0]}, or unset it" if near else f"unset {name}"
            found.append(Check(name, "warn", said, fix))
    return found
