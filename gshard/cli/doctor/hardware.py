"""Accelerators of the machine, found without JAX."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gshard.cli.doctor.apart import one_line
from gshard.cli.doctor.check import Check, size

_SECONDS = 20.0  # a driver that hangs lets nvidia-smi hang
_TAKEN = 0.1  # of a GPU's memory; a desktop takes less
_QUERY = "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"
# https://github.com/jax-ml/jax, jax/_src/hardware_utils.py: Google's PCI devices that are TPUs.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027", "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}


@dataclass(frozen=True)
class Hardware:
    """How many of each there are; of NVIDIA's GPUs their driver's version too, where it says so."""

    nvidia: int = 0
    driver: str = ""
    amd: int = 0
    tpu: int = 0

    @property
    def all(self) -> int:
        """Devices of any kind."""
        return self.nvidia + self.amd + self.tpu


def hardware(root: Path = Path("/")) -> tuple[Hardware, list[Check]]:
    """What is in the machine, and a line for each kind."""
    nvidia, driver, found = _nvidia(root)
    amd = len(_numbered(root / "dev/dri", "renderD")) if (root / "dev/kfd").exists() else 0
    here = Hardware(nvidia, driver, amd, _tpus(root))
    if amd:
        found.append(Check("AMD GPUs", "ok", f"{amd} in /dev/dri"))
    if here.tpu:
        found.append(Check("TPU chips", "ok", f"{here.tpu} in /dev"))
    return here, found or [Check("accelerators", "ok", "none in this machine")]


def _nvidia(root: Path) -> tuple[int, str, list[Check]]:
    """How many, the driver's version, and what is wrong with them."""
    count = len(_numbered(root / "dev", "nvidia"))
    program = shutil.which("nvidia-smi")
    if program is None:
        if not count:
            return 0, "", []
        said = f"{count} in /dev, and no nvidia-smi to ask"
        return count, "", [Check("NVIDIA GPUs", "ok", said)]
    try:
        said = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return count, "", [_broken(count, f"gives no answer in {_SECONDS:g} s")]
    except OSError as error:
        return count, "", [_broken(count, f"does not run ({error.strerror})")]
    rows = [[x.strip() for x in line.split(",")] for line in said.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if said.returncode or not rows:
        words = one_line(said.stdout + said.stderr) or "it names no GPU"
        return count, "", [_broken(count, f"fails: {words}")]
    names = sorted({row[0] for row in rows})
    about = f"{len(rows)} ({', '.join(names)}), driver {rows[0][1]}"
    return len(rows), rows[0][1], [Check("NVIDIA GPUs", "ok", about), *_taken(rows)]


def _broken(count: int, what: str) -> Check:
    said = f"{count} in /dev, and nvidia-smi {what}"
    mend = "restart, or install the driver anew; start a container with --gpus all"
    return Check("NVIDIA GPUs", "fail" if count else "warn", said, mend)


def _taken(rows: list[list[str]]) -> list[Check]:
    """GPUs whose memory other programs hold."""
    taken = []
    for i, (_, _, total, used) in enumerate(rows):
        if total.isdigit() and used.isdigit() and int(used) > _TAKEN * int(total):
            taken.append(f"GPU {i}: {size(int(used) * 2**20)} of {size(int(total) * 2**20)}")
    if not taken:
        return []
    mend = "end the programs that nvidia-smi names, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return [Check("GPU memory", "warn", f"other programs hold {', '.join(taken)}", mend)]


def _tpus(root: Path) -> int:
    """Chips: /dev/accel0 and so on, or /dev/vfio/0 beside a TPU on the PCI bus."""
    chips = len(_numbered(root / "dev", "accel"))
    if chips:
        return chips
    if not _numbered(root / "dev/vfio", ""):
        return 0
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(_id(d / "vendor") == _GOOGLE and _id(d / "device") in _TPUS for d in devices)


def _id(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbered(folder: Path, prefix: str) -> list[str]:
    """Names in a folder that are a prefix and a number."""
    names = [p.name for p in folder.glob(f"{prefix}*")] if folder.is_dir() else []
    return [name for name in names if name.removeprefix(prefix).isdigit()]


def to_install(platform: str, here: Hardware, jax: str, extras: list[str]) -> str:
    """The line of pip that gives JAX a platform (`nvidia`, `amd`, `tpu`).

    Args:
      platform: a field of `Hardware`.
      here: the machine; CUDA 13 needs a driver of 580 or newer.
      jax: its version, which stays.
      extras: names that this JAX offers in brackets.
    """
    major = here.driver.split(".")[0]
    wanted = {
        "nvidia": "cuda12" if major.isdigit() and int(major) < 580 else "cuda13",
        "amd": next((x for x in extras if x.startswith("rocm")), "rocm"),
        "tpu": "tpu",
    }[platform]
    return f'pip install -U "jax[{wanted}]=={jax}"'


def visible(told: Mapping[str, str]) -> str:
    """The variable that hides GPUs of the machine from this process; empty where none does."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
    return next((name for name in names if name in told), "")
