"""The options of `gshard launch`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import check_integer
from gshard.distributed.env_vars import chosen_gpus, device_shares, visible_gpus
from gshard.distributed.initialize import HEARTBEAT_TIMEOUT, INITIALIZATION_TIMEOUT
from gshard.distributed.rendezvous import Address, address, is_loopback, resolved

_EXAMPLES = """examples:
  gshard launch --nproc_per_node 4 --virtual_devices 2 train.py --steps 100
      four processes of two virtual CPU devices each, on this machine
  gshard launch --gpus 0,1,2,3 -m my_package.train
      one process for each of four GPUs
  gshard launch --nnodes 2 --rank 0 --master 10.0.0.1:29500 train.py
      the first of two machines; the same with --rank 1 on the second
exit code:
  that of the first process to fail (128 + the signal that killed it); 75 when the job was told to
  stop (SIGTERM) and all processes did so in order; 130 after Ctrl-C
"""


@dataclass(frozen=True)
class Request:
    """A job, as far as this machine runs it."""

    target: str
    module: bool
    arguments: tuple[str, ...]
    processes: int
    machines: int
    machine: int
    master: Address | None
    variables: tuple[dict[str, str], ...]
    log_dir: Path
    max_restarts: int
    grace: int
    heartbeat_timeout: int
    start_timeout: int

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.machines * self.processes

    def rank(self, local: int) -> int:
        """Returns the rank of one of this machine's processes."""
        return self.machine * self.processes + local


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        program,
        usage=f"{program} [options] [-m] SCRIPT [ARGUMENTS ...]",
        description="Run a script in several processes, on one machine or on each of many. The "
        "script calls gshard.distributed.initialize() before it uses JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = made.add_argument
    add("--nproc_per_node", type=int, metavar="N", help="processes on this machine (default: one "
        "for each device of --devices, else for each visible GPU, else 1)")  # fmt: skip
    add("--nnodes", type=int, default=1, metavar="N", help="machines of the job (default 1)")
    add("--rank", type=int, metavar="R", help="this machine's number, from 0; with --nnodes")
    add("--master", metavar="HOST:PORT", help="address of machine 0, where process 0 listens "
        "(default on one machine: loopback and a free port)")  # fmt: skip
    add("--devices", "--gpus", "--selected_gpus", metavar="A,B", help="GPUs of this machine to "
        "use, split evenly between its processes (default: all visible)")  # fmt: skip
    add("--virtual_devices", type=int, metavar="N", help="virtual CPU devices of each process, "
        "instead of GPUs")  # fmt: skip
    add("--log_dir", type=Path, default=Path("log"), metavar="DIR", help="folder of rank-R.log, "
        "readable by its owner alone, to which each run is appended (default: log)")  # fmt: skip
    add("--max_restarts", type=int, default=0, metavar="N", help="start all processes again, so "
        "often, when one has failed (default 0)")  # fmt: skip
    add("--grace", type=int, default=30, metavar="SECONDS", help="after SIGTERM the processes "
        "have so long to save and stop (default 30)")  # fmt: skip
    add("--heartbeat_timeout", type=int, default=HEARTBEAT_TIMEOUT, metavar="SECONDS",
        help=f"a silent process counts as dead (default {HEARTBEAT_TIMEOUT})")  # fmt: skip
    add("--start_timeout", type=int, default=INITIALIZATION_TIMEOUT, metavar="SECONDS",
        help="all processes have so long to arrive "
        f"(default {INITIALIZATION_TIMEOUT})")  # fmt: skip
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    return made


def _split(made: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the launcher's words from the script and its arguments, which may be anything."""
    takes = {name: a.nargs != 0 for a in made._actions for name in a.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if takes.get(words[at]) else 1
    script = words[at:]
    return words[:at], script[1:] if script[:1] == ["--"] else script


def request(program: str, words: list[str]) -> Request:
    """Reads the request of a command line.

    Raises:
      GShardError: an option does not exist, or values contradict each other.
    """
    made = parser(program)
    options = [name for action in made._actions for name in action.option_strings]
    words, script = _split(made, words)
    try:
        given, unknown = made.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise GShardError(f"{error}. `{program} --help` lists the options.") from error
    if unknown:
        name = unknown[0].split("=")[0]
        raise GShardError(
            f"{name!r} is no option of {program}.{did_you_mean(name, options)} Options of the "
            "script come after its name."
        )
    if not script:
        raise GShardError(f"{program}: name the script to run. `{program} --help` says more.")
    given.script, *given.arguments = script
    if not given.module and not os.path.exists(given.script):
        hint = " For a module say -m." if "." in given.script and "/" not in given.script else ""
        raise GShardError(f"{program}: there is no file {given.script!r} here.{hint}")
    return _checked(given)


def _checked(given: argparse.Namespace) -> Request:
    for name, least in (("nnodes", 1), ("max_restarts", 0), ("grace", 0)):
        check_integer(f"--{name}", getattr(given, name), least)
    for name in ("heartbeat_timeout", "start_timeout"):
        check_integer(f"--{name}", getattr(given, name), 1, " of seconds")
    master = None if given.master is None else address(given.master, "--master")
    _check_machines(given, master)
    if given.virtual_devices is not None and given.devices is not None:
        raise GShardError(
            f"--devices {given.devices} names GPUs, and --virtual_devices "
            f"{given.virtual_devices} asks for CPU devices: choose one of the two."
        )
    devices = chosen_gpus("--devices", given.devices)
    processes = given.nproc_per_node
    if processes is None:
        on_cpu = given.virtual_devices is not None
        processes = 1 if on_cpu else max(1, len(devices or visible_gpus()))
    check_integer("--nproc_per_node", processes, 1)
    variables = device_shares(processes, devices, given.virtual_devices, "--")
    return Request(
        target=given.script,
        module=given.module,
        arguments=tuple(given.arguments),
        processes=processes,
        machines=given.nnodes,
        machine=given.rank or 0,
        master=master,
        variables=tuple(variables),
        log_dir=given.log_dir,
        max_restarts=given.max_restarts,
        grace=given.grace,
        heartbeat_timeout=given.heartbeat_timeout,
        start_timeout=given.start_timeout,
    )


def _check_machines(given: argparse.Namespace, master: Address | None) -> None:
    if given.nnodes == 1:
        if given.rank not in (None, 0):
            raise GShardError(f"--rank {given.rank} needs --nnodes, the number of machines.")
        return
    missing = [f"--{n}" for n in ("rank", "master") if getattr(given, n) is None]
    if missing:
        raise GShardError(
            f"--nnodes {given.nnodes} needs {' and '.join(missing)} too: the number of this "
            "machine, from 0, and 'host:port' of machine 0, the same on all of them."
        )
    if not 0 <= given.rank < given.nnodes:
        raise GShardError(
            f"--rank {given.rank} is no machine of --nnodes {given.nnodes}: they run from 0 to "
            f"{given.nnodes - 1}."
        )
    if master is None:
        return
    # Debian and Ubuntu write a machine's own name into its /etc/hosts as 127.0.1.1.
    place = master.host if given.rank else resolved(master.host)
    if is_loopback(place):
        here = "" if place == master.host else f" ({place} in its own /etc/hosts or DNS)"
        raise GShardError(
            f"--master {master} is this machine alone{here}, and the job has {given.nnodes}. Name "
            "the address by which the others reach machine 0."
        )
