"""Checks the versions of packages that gshard and JAX require, and environment variables.

All bounds come from the metadata of the installed packages, so that none is written twice.
"""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata

import jax

from gshard._util.validation import shown
from gshard.cli.doctor.check import Check
from gshard.distributed import env_vars

PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
_ASKING = "gshard", "jax", "flax", "optax", "orbax-checkpoint"
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)|libtpu")
_FOR_DEVELOPMENT = {"test", "dev", "peers"}
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_COMPARED = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def versions() -> list[Check]:
    """Checks Python, the packages, the plugins of JAX, and which extras of gshard are installed."""
    try:
        floor = metadata.metadata("gshard")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return [
            Check(
                "gshard",
                "warn",
                "on the path, but not installed: what it asks for is not known",
                "pip install gshard, or `pip install -e .` in its folder",
            )
        ]
    found = [_gshard(), _python(floor), *map(package, PACKAGES)]
    names = {_normal(d.metadata["Name"] or "") for d in metadata.distributions()}
    found += [plugin(name) for name in sorted(filter(_PLUGIN.fullmatch, names))]
    return [*found, extras()]


def _gshard() -> Check:
    return Check("gshard", "ok", metadata.version("gshard"))


def _python(floor: str) -> Check:
    here = platform.python_version()
    if _met(here, floor):
        return Check("Python", "ok", here)
    return Check(
        "Python", "fail", f"{here}; gshard asks for {floor}", f"make an environment of {floor}"
    )


def package(name: str) -> Check:
    """Checks the version of a package against what gshard and the other packages require."""
    here, asked = _version(name), _asked(name)
    wanted = ", ".join(f"{who} asks for {what}" for who, what in asked)
    to_install = f"{name}{asked[0][1]}" if asked else name
    if here is None:
        why = f"not installed{'; ' if wanted else ''}{wanted}"
        return Check(name, "fail", why, f'pip install "{to_install}"')
    for who, what in asked:
        if not _met(here, what):
            found = f"{here}; {who} asks for {name}{what}"
            return Check(name, "fail", found, f'pip install -U "{name}{what}"')
    return Check(name, "ok", here)


def plugin(name: str) -> Check:
    """Checks a plugin of JAX: JAX ignores a plugin of another version than it requires."""
    here, jax = _version(name) or "", _version("jax")
    asked = [what for one, what, marker in _requirements("jax") if one == name and marker]
    extra = name.removeprefix("jax-").split("-")[0].replace("libtpu", "tpu")
    if name.endswith("pjrt"):
        asked = [f"=={_version(name.replace('pjrt', 'plugin'))}"]
    for what in asked:
        if not _met(here, what):
            return Check(
                name,
                "warn",
                f"{here}; JAX {jax} asks for {name}{what}, and may not use it",
                f'pip install -U "jax[{extra}]=={jax}"',
            )
    return Check(name, "ok", here)


def extras() -> Check:
    """Lists which optional parts of gshard are installed; none is required."""
    there, missing = [], []
    for extra in metadata.metadata("gshard").get_all("Provides-Extra") or []:
        if extra in _FOR_DEVELOPMENT:
            continue
        marker = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
        needs = [(n, w) for n, w, m in _requirements("gshard") if marker.search(m)]
        met = all((here := _version(name)) and _met(here, what) for name, what in needs)
        (there if met else missing).append(extra)
    found = f"installed: {', '.join(sorted(there)) or 'none'}"
    if missing:
        names = ", ".join(sorted(missing))
        found += f'; not installed: {names} (pip install "gshard[{min(missing)}]")'
    return Check("optional extras", "ok", found)


# ---- metadata ------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _asked(name: str) -> list[tuple[str, str]]:
    """Returns (package, versions) for each package that requires this one unconditionally."""
    return [
        (who, what)
        for who in _ASKING
        for one, what, marker in _requirements(who)
        if one == name and what and not marker
    ]


def _requirements(name: str) -> list[tuple[str, str, str]]:
    """Returns (name, versions, marker) of each requirement of a package."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = [match.groups("") for line in lines if (match := _REQUIREMENT.match(line))]
    return [(_normal(n), what.replace(" ", ""), marker.strip()) for n, what, marker in found]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _met(version: str, specifier: str) -> bool:
    """Whether a version matches a specifier; parts of unknown forms are ignored."""
    here = _numbers(version)
    for part in filter(None, specifier.split(",")):
        match = re.fullmatch(r"(>=|<=|==|>|<)([\d.]+?)(\.\*)?", part)
        if match is None:
            continue
        operator, text, any_rest = match.groups()
        there = _numbers(text)
        if operator == "==":
            same = here[: len(there)] == there if any_rest else _same(here, there)
            if not same:
                return False
        elif not (_COMPARED[operator](here, there) or ("=" in operator and _same(here, there))):
            return False
    return True


def _same(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    most = max(len(a), len(b))
    return a + (0,) * (most - len(a)) == b + (0,) * (most - len(b))


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the release of a version: `(0, 10, 2)` of `0.10.2.dev1+cuda`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_OURS = [name for name in vars(env_vars).values() if str(name).startswith("GSHARD_")]
# Variables of JAX in addition to its settings.
_OF_JAX = {
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS",
}  # fmt: skip
# How similar a name must be; other programs also have variables that begin with JAX_.
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
    "JAX_ENABLE_COMPILATION_CACHE": (_is_off, False, "programs are recompiled at every start"),
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
    """Returns a warning for each variable that turns something off, and a line with the others.

    Args:
      accelerators: number of GPUs and TPU chips of the machine.
      told: the environment variables.
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
    """Checks for variables that nothing reads: gshard's, and near misses of JAX's settings."""
    settings = {name.upper() for name in jax.config.values if name.startswith("jax_")} | _OF_JAX
    found = []
    for prefix, known in (("GSHARD_", _OURS), ("JAX_", settings)):
        for name in sorted(told):
            if not name.startswith(prefix) or name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR[prefix])
            if near or prefix == "GSHARD_":
                fix = f"rename it to {near[0]}, or unset it" if near else f"unset {name}"
                what = f"{shown(told[name])}: no setting has this name"
                found.append(Check(name, "warn", what, fix))
    return found
