"""Checks the machine: memory, cores, accelerators and disks, and the limits of a container."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gshard._util.cgroup import cgroup_limits, contents
from gshard.cli.doctor.check import GIB, Check, one_line, size

_LITTLE_MEMORY = GIB
_LITTLE_SHARED = GIB  # NCCL and loaders of data keep buffers there; Docker gives 64 MiB


def machine(accelerators: int, root: Path = Path("/")) -> list[Check]:
    """Checks memory, swap, /dev/shm and cores.

    Args:
      accelerators: number of accelerators of the machine.
      root: the folder that contains `proc`, `sys` and `dev`.
    """
    limits = cgroup_limits(root)
    return [*_memory(limits[0], root), *_shared(accelerators, root), _cores(limits[1])]


def _memory(limit: float | None, root: Path) -> list[Check]:
    found = _lines(root / "proc/meminfo")
    if "MemTotal" not in found:
        return [Check("host memory", "ok", "this system does not say")]
    total, free = found["MemTotal"], found.get("MemAvailable", found["MemTotal"])
    said = f"{size(free)} free of {size(total)}, swap {size(found.get('SwapTotal', 0))}"
    if limit is not None and limit < total:
        said += f"; the container (cgroup) is limited to {size(limit)}"
    if min(free, limit if limit is not None else free) < _LITTLE_MEMORY:
        fix = "end other programs, or give the container more: less than 1 GiB does not start JAX"
        return [Check("host memory", "warn", said, fix)]
    return [Check("host memory", "ok", said)]


def _shared(accelerators: int, root: Path) -> list[Check]:
    folder = root / "dev/shm"
    if not folder.is_dir():
        return []
    usage = shutil.disk_usage(folder)
    said = f"{size(usage.free)} free of {size(usage.total)}"
    if accelerators > 1 and usage.free < _LITTLE_SHARED:
        fix = "NCCL needs room there: docker run --shm-size=8g, or mount an emptyDir of Memory"
        return [Check("/dev/shm", "warn", said, fix)]
    return [Check("/dev/shm", "ok", said)]


def _cores(limit: float | None) -> Check:
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = f"{here} of {os.cpu_count()}"
    if limit is not None and limit < here:
        said += f"; the container (cgroup) is limited to {limit:g}"
        fix = "XLA starts a thread for each core, and they wait for each other: give it all cores"
        return Check("CPU cores", "warn", said, fix)
    return Check("CPU cores", "ok", said)


def _lines(path: Path) -> dict[str, int]:
    """Reads lines such as `MemTotal: 24 kB`, in bytes."""
    found = {}
    for line in contents(path).splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            found[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return found


_SECONDS = 20.0  # a driver that hangs lets nvidia-smi hang
_TAKEN = 0.1  # of a GPU's memory; a desktop takes less
_QUERY = "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"
# https://github.com/jax-ml/jax, jax/_src/hardware_utils.py: Google's PCI devices that are TPUs.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027", "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}


@dataclass(frozen=True)
class Hardware:
    """The number of devices of each kind, and the version of NVIDIA's driver if it reports one."""

    nvidia: int = 0
    driver: str = ""
    amd: int = 0
    tpu: int = 0

    @property
    def all(self) -> int:
        """The number of devices of all kinds."""
        return self.nvidia + self.amd + self.tpu


def hardware(root: Path = Path("/")) -> tuple[Hardware, list[Check]]:
    """Returns the devices in the machine, and a check for each kind."""
    nvidia, driver, found = _nvidia(root)
    amd = len(_numbered(root / "dev/dri", "renderD")) if (root / "dev/kfd").exists() else 0
    here = Hardware(nvidia, driver, amd, _tpus(root))
    if amd:
        found.append(Check("AMD GPUs", "ok", f"{amd} in /dev/dri"))
    if here.tpu:
        found.append(Check("TPU chips", "ok", f"{here.tpu} in /dev"))
    return here, found or [Check("accelerators", "ok", "none in this machine")]


def _nvidia(root: Path) -> tuple[int, str, list[Check]]:
    """Returns the number of NVIDIA GPUs, the driver's version, and what is wrong with them."""
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
    fix = "restart, or reinstall the driver; start a container with --gpus all"
    return Check("NVIDIA GPUs", "fail" if count else "warn", said, fix)


def _taken(rows: list[list[str]]) -> list[Check]:
    """Checks for GPUs whose memory other programs use."""
    taken = []
    for i, (_, _, total, used) in enumerate(rows):
        if total.isdigit() and used.isdigit() and int(used) > _TAKEN * int(total):
            taken.append(f"GPU {i}: {size(int(used) * 2**20)} of {size(int(total) * 2**20)}")
    if not taken:
        return []
    fix = "end the programs that nvidia-smi names, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return [Check("GPU memory", "warn", f"other programs hold {', '.join(taken)}", fix)]


def _tpus(root: Path) -> int:
    """Counts TPU chips: /dev/accel0 and so on, or /dev/vfio/0 with a TPU on the PCI bus."""
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
    """Lists the names in a folder that are a prefix and a number."""
    names = [p.name for p in folder.glob(f"{prefix}*")] if folder.is_dir() else []
    return [name for name in names if name.removeprefix(prefix).isdigit()]


def to_install(platform: str, here: Hardware, jax: str, extras: list[str]) -> str:
    """Returns the pip command that gives JAX a platform (`nvidia`, `amd`, `tpu`).

    Args:
      platform: a field of `Hardware`.
      here: the machine; CUDA 13 needs a driver of 580 or newer.
      jax: the version of JAX, which is kept.
      extras: names of the extras of this version of JAX.
    """
    major = here.driver.split(".")[0]
    wanted = {
        "nvidia": "cuda12" if major.isdigit() and int(major) < 580 else "cuda13",
        "amd": next((x for x in extras if x.startswith("rocm")), "rocm"),
        "tpu": "tpu",
    }[platform]
    return f'pip install -U "jax[{wanted}]=={jax}"'


def visible(told: Mapping[str, str]) -> str:
    """Returns the variable that hides GPUs from this process; empty if none does."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
    return next((name for name in names if name in told), "")


_BYTES = 16 * 2**20


def disks() -> list[Check]:
    """Checks the temporary and the current directory."""
    found = []
    asked = {"temporary directory": tempfile.gettempdir, "current directory": os.getcwd}
    for name, ask in asked.items():
        try:
            folder = ask()
        except OSError as error:  # it was removed; or none can be written
            found.append(Check(name, "fail", str(error), "cd to a folder that is there"))
            continue
        found.append(written(name, Path(folder)))
    wanted = os.environ.get("TMPDIR")
    if wanted and os.path.abspath(wanted) != tempfile.gettempdir():
        said = f"{wanted} cannot be used; temporary files go to {tempfile.gettempdir()}"
        found.append(Check("TMPDIR", "warn", said, "name a folder that can be written"))
    return found


def written(name: str, folder: Path, count: int = _BYTES) -> Check:
    """Writes so many bytes into a new file, flushes, renames and reads it, and removes it."""
    fix = f"give {folder} room and leave to write, or run where there is"
    data = os.urandom(2**20) * (count // 2**20)
    try:
        free = shutil.disk_usage(folder).free
        began = time.perf_counter()
        number, first = tempfile.mkstemp(prefix=".gshard-doctor-", dir=folder)
        path = Path(first)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            path = path.rename(f"{first}-renamed")
            same = path.read_bytes() == data
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror}", fix)
    if not same:
        return Check(
            name, "fail", f"{folder}: what is read is not what was written", "use another disk"
        )
    said = f"{folder}: {count / 1e6 / seconds:,.0f} MB/s written, {size(free)} free"
    if free < GIB:
        return Check(name, "warn", said, "less than 1 GiB: a checkpoint may not fit")
    return Check(name, "ok", said)
