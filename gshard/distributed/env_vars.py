"""Environment variables that give a process its position in a job, and its devices.

`spawn` and `gshard launch` set them; the GPUs of a machine are counted without starting JAX.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from gshard._util.cpu_threads import thread_variables
from gshard._util.errors import GShardError
from gshard._util.events import STATUS_FILE as STATUS_FILE
from gshard._util.programs import output_of
from gshard._util.validation import check_integer, shown

COORDINATOR = "GSHARD_COORDINATOR"
NUM_PROCESSES = "GSHARD_NUM_PROCESSES"
PROCESS_ID = "GSHARD_PROCESS_ID"
LOCAL_PROCESS_ID = "GSHARD_LOCAL_PROCESS_ID"
HEARTBEAT_TIMEOUT = "GSHARD_HEARTBEAT_TIMEOUT"
START_TIMEOUT = "GSHARD_START_TIMEOUT"
HANG_TIMEOUT = "GSHARD_HANG_TIMEOUT"
RESTARTS = "GSHARD_RESTARTS"
MACHINES = "GSHARD_NNODES"  # of an elastic job, such as "3 of 2:4"
PORT_IS_KEPT = "GSHARD_PORT_IS_KEPT"
GRACE = "GSHARD_GRACE"

# The first that is set says which GPUs this process sees, and is set for those that it starts.
_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_DRIVER_TIMEOUT = 60.0  # seconds; it may initialize eight GPUs first
_NO_GPU = ("", "-1", "NoDevFiles", "none", "void")  # as Slurm and container runtimes write it
_OPEN_MPI = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BOUND = re.compile("map_gpu|mask_gpu|per_task|single")  # "closest" may be that of others too
_FORCED = re.compile(r"--xla_force_host_platform_device_count=\d+")


class JobPosition(NamedTuple):
    """The position of a process in its job; fields that are not known are None."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


def read_position() -> JobPosition:
    """Reads this process's position from the environment variables."""
    coordinator = os.environ.get(COORDINATOR) or None
    return JobPosition(coordinator, read_integer(NUM_PROCESSES), read_integer(PROCESS_ID))


def read_integer(name: str) -> int | None:
    """Reads an integer from an environment variable; None if it is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise GShardError(f"the variable {name}={shown(text)} must be an integer.") from None


_LAUNCHERS = {  # others: their names of the rank and of the number of processes
    "torchrun": ("RANK", "WORLD_SIZE"),
    "paddle.distributed.launch": ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    "your own script": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),  # JAX reads neither
}


def of_other_launchers() -> tuple[str, int] | None:
    """What another launcher says, such as `RANK=1 of WORLD_SIZE=2`, and how many processes."""
    for launcher, names in _LAUNCHERS.items():
        rank, count = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and count.isdecimal() and int(count) > 1:
            return f"{names[0]}={rank} and {names[1]}={count}, which {launcher} sets", int(count)
    return None


def read_seconds(name: str, default: int, least: int = 1) -> int:
    """Reads a number of seconds from an environment variable."""
    given = read_integer(name)
    return default if given is None else check_integer(name, given, least, " of seconds")


def process_variables(
    coordinator_address: object,
    num_processes: int,
    process_id: int,
    local_process_id: int,
    *,
    heartbeat_timeout_seconds: int,
    initialization_timeout: int,
    hang_timeout: int,
    restarts: int = 0,
    port_is_kept: bool = False,
) -> dict[str, str]:
    """Returns the environment variables that give one process its position in the job."""
    return {
        COORDINATOR: str(coordinator_address),
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process_id),
        LOCAL_PROCESS_ID: str(local_process_id),
        HEARTBEAT_TIMEOUT: str(heartbeat_timeout_seconds),
        START_TIMEOUT: str(initialization_timeout),
        HANG_TIMEOUT: str(hang_timeout),
        RESTARTS: str(restarts),
        PORT_IS_KEPT: "1" if port_is_kept else "",
    }


class TooFewDevicesError(GShardError, RuntimeError):
    """Fewer devices than processes that need one each."""


def visible_gpus() -> list[str]:
    """Returns the names of the GPUs that this process sees, from its variables or the driver."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return []
    for name in _VISIBLE:
        if (given := os.environ.get(name)) is not None:
            return [d.strip() for d in given.split(",") if d.strip() not in _NO_GPU]
    if not (program := shutil.which("nvidia-smi")):
        return []
    try:
        said, _ = output_of([program, "-L"], _DRIVER_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        raise GShardError(
            f"{program} -L, which lists the GPUs, "
            f"{'does not answer' if late else f'cannot run ({error})'}. `gshard doctor` says more. "
            f"To go on without it, name the GPUs in {_VISIBLE[0]}, or give JAX_PLATFORMS=cpu."
        ) from error
    lines = [line for line in said.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(lines))]


def chosen_gpus(argument: str, devices: str | Sequence[int | str] | None) -> list[str] | None:
    """Checks the GPUs that a user names, as a list; None if none are named."""
    if devices is None:
        return None
    names = devices.split(",") if isinstance(devices, str) else devices
    given = f"{argument}={shown(devices)}"
    if not isinstance(names, (list, tuple, range)):
        raise GShardError(f"{given} must list devices, such as '0,1'.")
    found, visible = [str(name).strip() for name in names], visible_gpus()
    for name in found:
        if name not in visible:
            have = f"This process sees {', '.join(visible) or 'no GPU'}."
            instead = "--virtual_devices" if argument.startswith("--") else "virtual_devices"
            raise GShardError(
                f"{given}: {name or 'an empty name'} is not a visible device. {have} For CPU "
                f"devices give {instead} a number instead."
            )
    if not found or len(set(found)) < len(found):
        raise GShardError(f"{given}: name at least one device, each once.")
    return found


def device_shares(
    processes: int, devices: list[str] | None, virtual_devices: int | None, prefix: str = ""
) -> list[dict[str, str]]:
    """Returns the variables that give each of several processes of one machine its own devices.

    These are GPUs from `chosen_gpus` (None: all visible ones), or virtual CPU devices. `prefix` is
    that of both arguments in messages, such as `--`.
    """
    if virtual_devices is not None:
        count = check_integer(f"{prefix}virtual_devices", virtual_devices, 1)
        flags = _FORCED.sub("", os.environ.get("XLA_FLAGS", "")).strip()
        cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count), "XLA_FLAGS": flags}
        return [cpu | thread_variables(count)] * processes
    gpus = visible_gpus() if devices is None else devices
    if devices is None and not gpus:
        return [{} for _ in range(processes)]
    if devices is None and len(gpus) < processes:
        raise TooFewDevicesError(
            f"{processes} processes need a GPU each, and this one sees {len(gpus)}: "
            f"{', '.join(gpus)}. Start fewer processes, or give them virtual CPU devices."
        )
    each, rest = divmod(len(gpus), processes)
    if rest or not each:
        names = ",".join(gpus)
        named = f"this process sees {len(gpus)} GPUs, {names}"
        if devices is not None:
            named = f"{prefix}devices={names} names {len(gpus)} devices"
        raise GShardError(
            f"{named}, which cannot be split evenly between {processes} processes. Name a multiple "
            f"of {processes} in {prefix}devices."
        )
    variable = next((name for name in _VISIBLE if name in os.environ), _VISIBLE[0])
    return [{variable: ",".join(gpus[i * each : (i + 1) * each])} for i in range(processes)]


def gpus_of_task() -> list[int] | None:
    """Which of the visible GPUs are this process's, if Slurm or Open MPI started it.

    They are shared as by the launcher, unless the process sees its own alone. JAX would take the
    one with the process's number on its machine: one of many for a single process, and none that is
    there if each sees its own. Returns their numbers from 0; None where JAX chooses, or where
    gshard's launcher has shared them.
    """
    place = _place_on_machine()
    is_done = LOCAL_PROCESS_ID in os.environ or os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if place is None or is_done or not (gpus := visible_gpus()):
        return None
    number, processes = place
    per_task = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # such as "h100:2"
    is_bound = str(len(gpus)) == per_task or _BOUND.search(os.environ.get("SLURM_GPU_BIND", ""))
    if is_bound or len(gpus) < processes:
        processes, number = 1, 0
    each, rest = divmod(len(gpus), processes)
    return None if rest else [*range(number * each, (number + 1) * each)]


def _place_on_machine() -> tuple[int, int] | None:
    """The number of this process on its machine, and how many there are, as a cluster says it."""
    number, count = map(read_integer, _OPEN_MPI)
    if number is None or count is None:
        number, node = read_integer("SLURM_LOCALID"), read_integer("SLURM_NODEID")
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as "8(x2),4"
        counts = [int(n) for n, x in _REPEATED.findall(tasks) for _ in range(int(x or 1))]
        count = counts[node] if node is not None and node < len(counts) else None
    return None if number is None or not count else (number, count)


def devices_of(shares: Sequence[dict[str, str]]) -> int:
    """The number of devices of these variables; one for each process where they do not say."""
    found = 0
    for share in shares:
        gpus = [value for name, value in share.items() if name in _VISIBLE]
        found += len(gpus[0].split(",")) if gpus else int(share.get("JAX_NUM_CPU_DEVICES", 1))
    return found
