"""Checks the machine: its accelerators and disks, its network, and its job."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gshard._util.cgroup import contents
from gshard._util.errors import GShardError
from gshard._util.programs import output_of
from gshard._util.text import bytes_of
from gshard.distributed import env_vars
from gshard.distributed.env_vars import JobPosition
from gshard.distributed.initialize import resolve_position
from gshard.distributed.rendezvous import (
    Address,
    NotArrivedError,
    address,
    is_loopback,
    meet,
    resolved,
)

_GB = 10**9


@dataclass(frozen=True)
class Check:
    """What was checked, what was found, and how to fix it if that is wrong: one line each."""

    name: str
    ok: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def one_line(text: str) -> str:
    """Shortens a text and removes its line ends and terminal codes."""
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split())
    text = "".join(c for c in text if c.isprintable())
    return text if len(text) <= 240 else f"{text[:237]}..."


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
    # Beside an NVIDIA GPU it is the processor's own, and /dev/dri has a node for each of both.
    has_amd = not nvidia and (root / "dev/kfd").exists()
    amd = _numbered(root / "dev/dri", "renderD") if has_amd else 0
    pci = (root / "sys/bus/pci/devices").glob("*")
    ids = [(contents(d / "vendor").strip(), contents(d / "device").strip()) for d in pci]
    tpu = sum(vendor == _GOOGLE and device in _TPUS for vendor, device in ids)
    here = Hardware(nvidia, driver, amd, tpu)
    for count, name, at in (amd, "AMD GPUs", "in /dev/dri"), (tpu, "TPU chips", "on the PCI bus"):
        found += [Check(name, "ok", f"{count} {at}")] * (count > 0)
    return here, found or [Check("accelerators", "ok", "none in this machine")]


def _nvidia(root: Path) -> tuple[int, str, list[Check]]:
    """Returns the number of NVIDIA GPUs, the driver's version, and what is wrong with them."""
    count, name = _numbered(root / "dev", "nvidia"), "NVIDIA GPUs"
    program = shutil.which("nvidia-smi")
    if program is None:
        said = f"{count} in /dev, and no nvidia-smi to ask"
        return count, "", [Check(name, "ok", said)] if count else []
    rows, wrong = [], ""
    try:
        said, code = output_of([program, *_QUERY], seconds=20)
        rows = [[x.strip() for x in line.split(",")] for line in said.splitlines()]
        rows = [row for row in rows if len(row) == 4]
        if code or not rows:
            wrong = f"fails: {one_line(said) or 'it lists no GPU'}"
    except (subprocess.TimeoutExpired, OSError) as error:
        wrong = f"fails: {error}"
    if wrong:
        said = f"{count} in /dev, and nvidia-smi {wrong}"
        fix = "restart, or reinstall the driver; start a container with --gpus all"
        return count, "", [Check(name, "fail" if count else "warn", said, fix)]
    models, driver = sorted({row[0] for row in rows}), rows[0][1]
    found = [Check(name, "ok", f"{len(rows)} ({', '.join(models)}), driver {driver}")]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    taken = [
        f"GPU {i}: {bytes_of(int(used) * 2**20)} of {bytes_of(int(total) * 2**20)}"
        for i, (_, _, total, used) in enumerate(rows)
        if (chosen is None or str(i) in map(str.strip, chosen.split(",")))
        and (total.isdigit() and used.isdigit() and int(used) > _TAKEN * int(total))
    ]
    if taken:
        said = f"other programs hold {', '.join(taken)}"
        fix = "end the programs that nvidia-smi names, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        found.append(Check("GPU memory", "warn", said, fix))
    return len(rows), driver, found


def _numbered(folder: Path, prefix: str) -> int:
    """Counts the names in a folder that are a prefix and a number."""
    return sum(p.name.removeprefix(prefix).isdigit() for p in folder.glob(f"{prefix}*"))


def disks(accelerators: int) -> list[Check]:
    """Checks the temporary and the current directory, and /dev/shm."""
    found = []
    places = {"temporary directory": tempfile.gettempdir, "current directory": os.getcwd}
    for name, where in places.items():
        try:
            found.append(written(name, Path(where())))
        except OSError as error:  # it was removed; or none can be written
            found.append(Check(name, "fail", str(error), "cd to a folder that exists"))
    wanted = os.environ.get("TMPDIR")
    if wanted and os.path.abspath(wanted) != tempfile.gettempdir():
        said = f"{wanted} cannot be used; temporary files go to {tempfile.gettempdir()}"
        found.append(Check("TMPDIR", "warn", said, "name a folder that can be written"))
    if accelerators > 1 and os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free  # Docker gives 64 MiB
        if free < _GB:
            fix = "NCCL needs space there: docker run --shm-size=8g, or mount an emptyDir of Memory"
            found.append(Check("/dev/shm", "warn", f"{bytes_of(free)} free", fix))
    return found


def written(name: str, folder: Path, count: int = 16 * 2**20) -> Check:
    """Writes so many bytes into a new file, flushes, renames and removes it."""
    data = os.urandom(2**20) * (count // 2**20)
    try:
        free = shutil.disk_usage(folder).free
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix=".gshard-doctor-", dir=folder) as inside:
            with open(Path(inside, "new"), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            Path(inside, "new").rename(Path(inside, "renamed"))
    except OSError as error:
        fix = f"free some space in {folder} and make it writable, or run elsewhere"
        return Check(name, "fail", f"{folder}: {error.strerror}", fix)
    said = f"{folder}: {count / 1e6 / seconds:,.0f} MB/s written, {bytes_of(free)} free"
    if free < _GB:
        return Check(name, "warn", said, "less than 1 GB: a checkpoint may not fit")
    return Check(name, "ok", said)


def own_name() -> list[Check]:
    """Checks that the machine's name has an address."""
    name = socket.gethostname()
    at = resolved(name)
    if at == name:
        fix = f"write a line with its address and {name} into /etc/hosts"
        return [Check("own name", "warn", f"{name} has no address; Gloo looks for one", fix)]
    alone = " (loopback: enough for one machine)" if is_loopback(at) else ""
    return [Check("own name", "ok", f"{name} is {at}{alone}")]


def cluster(seconds: float) -> list[Check]:
    """Checks this process's position in its job, and waits up to `seconds` for the others."""
    try:
        position = resolve_position(JobPosition(None, None, None))
    except GShardError as error:
        fix = "set GSHARD_COORDINATOR, GSHARD_NUM_PROCESSES and GSHARD_PROCESS_ID, or none of them"
        return [Check("job", "fail", str(error), fix)]
    rank, count = position.process_id, position.num_processes
    if rank is None or count is None:
        return [_detected(os.environ)]
    found = [Check("job", "ok", f"rank {rank} of {count}, by GSHARD_* variables")]
    if count > 1:
        at = address(position.coordinator_address, env_vars.COORDINATOR)
        found.append(met(at, rank, count, seconds))
    return found


def _detected(environment: Mapping[str, str]) -> Check:
    """Checks what a cluster says of this process, which JAX then reads."""
    for rank, count in (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if rank in environment and count in environment:
            said = f"rank {environment[rank]} of {environment[count]}, by {rank}"
            return Check("job", "ok", said)
    if environment.get("SLURM_JOB_ID") and environment.get("SLURM_NTASKS", "1") != "1":
        said = f"job {environment['SLURM_JOB_ID']} of Slurm, but srun did not start this process"
        fix = "start the script by srun, or by `gshard launch --nnodes ... --rank $SLURM_NODEID`"
        return Check("job", "warn", f"{said}: it is alone", fix)
    if (found := env_vars.of_other_launchers()) is not None:
        fix = "start the script by `gshard launch`, or give initialize() the position"
        return Check("job", "warn", f"{found[0]}: it is alone", fix)
    return Check("job", "ok", "this process is alone: no variable of a launcher or a cluster")


def met(at: Address, rank: int, count: int, seconds: float) -> Check:
    """Meets the other processes of the job, as at the start of a training."""
    try:
        meet(at, count, rank, seconds, bool(os.environ.get(env_vars.PORT_IS_KEPT)))
    except NotArrivedError as error:
        fix = "start the doctor on every machine in the same way as the training, within --timeout "
        fix += f"of each other, and let firewalls allow port {at.port}"
        return Check("coordinator", "fail", str(error), fix)
    except GShardError as error:  # says how to fix it
        return Check("coordinator", "fail", str(error))
    return Check("coordinator", "ok", f"all {count} processes met at {at}")
