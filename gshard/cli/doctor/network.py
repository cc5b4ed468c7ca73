"""Checks the network: a port on loopback, this machine's name, and process 0 of the job."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack

from gshard._util.errors import GShardError
from gshard.cli.doctor.check import Check
from gshard.distributed import env_vars
from gshard.distributed.env_vars import JobPosition
from gshard.distributed.initialize import resolve_position
from gshard.distributed.rendezvous import (
    LOOPBACK,
    Address,
    address,
    is_loopback,
    listen,
    resolved,
)

SECONDS = 5.0  # that somebody has to answer


def network() -> list[Check]:
    """Checks a port on loopback, and the address of the machine's name."""
    return [_loopback(), _own_name()]


def _loopback() -> Check:
    try:
        with listen(Address(LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=SECONDS) as sender:
                listener.settimeout(SECONDS)
                receiver, _ = listener.accept()
                with receiver:
                    receiver.settimeout(SECONDS)
                    sender.sendall(b"x")
                    heard = receiver.recv(1)
        if heard != b"x":
            raise OSError("the connection was closed")
    except (OSError, GShardError) as error:
        fix = f"let a firewall or sandbox pass connections of {LOOPBACK} to itself"
        return Check("loopback", "fail", f"{LOOPBACK}: {error}", fix)
    return Check("loopback", "ok", f"port {port} of {LOOPBACK} listens and answers")


def _own_name() -> Check:
    name = socket.gethostname()
    at = resolved(name)
    if at == name:
        fix = f"write a line with its address and {name} into /etc/hosts"
        return Check("own name", "warn", f"{name} has no address; Gloo looks for one", fix)
    alone = " (loopback: enough for one machine)" if is_loopback(at) else ""
    return Check("own name", "ok", f"{name} is {at}{alone}")


# whose, rank, processes
_CLUSTERS = (
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JAX's variables", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
)
_RETRY = 0.2  # seconds


def cluster(held: ExitStack) -> list[Check]:
    """Checks this process's position in its job, as `gshard.distributed.initialize()` reads it.

    Args:
      held: keeps the port of process 0 open, so that the others of the job reach it meanwhile.
    """
    try:
        place = resolve_position(JobPosition(None, None, None))
    except GShardError as error:
        fix = "set GSHARD_COORDINATOR, GSHARD_NUM_PROCESSES and GSHARD_PROCESS_ID, or none of them"
        return [Check("job", "fail", str(error), fix)]
    if place.num_processes is None:
        return _detected(os.environ)
    said = f"rank {place.process_id} of {place.num_processes}, by GSHARD_* variables"
    found = [Check("job", "ok", said)]
    if place.num_processes > 1:
        at = address(place.coordinator_address, env_vars.COORDINATOR)
        found.append(_own_port(at, held) if place.process_id == 0 else reached(at))
    return found


def _detected(told: Mapping[str, str]) -> list[Check]:
    for whose, rank, count in _CLUSTERS:
        if rank in told and count in told:
            found = [Check("job", "ok", f"rank {told[rank]} of {told[count]}, by {whose}")]
            if host := _first_host(told):
                found.append(_known(host))
            return found
    if "SLURM_JOB_ID" in told:
        said = f"job {told['SLURM_JOB_ID']} of Slurm, but this process was not started by srun"
        if told.get("SLURM_NTASKS", "1") == "1":
            return [Check("job", "ok", said)]
        fix = "start the script by srun, or by `gshard launch --nnodes ... --rank $SLURM_NODEID`"
        return [Check("job", "warn", f"{said}: it is alone", fix)]
    return [Check("job", "ok", "this process is alone: no variable of a launcher or a cluster")]


def _first_host(told: Mapping[str, str]) -> str:
    """Returns the machine of process 0: `n01` of `n[01-04,07],m2`; empty if unknown."""
    if at := told.get("JAX_COORDINATOR_ADDRESS"):
        return at.rpartition(":")[0]
    nodes = told.get("SLURM_STEP_NODELIST") or told.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _known(host: str) -> Check:
    """Checks that a host name has an address here; JAX chooses the port."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return _unknown(host, error)
    return Check("coordinator", "ok", f"{host} has an address; JAX chooses the port")


def _unknown(host: str, error: OSError) -> Check:
    fix = "give its IP address instead, or let DNS or /etc/hosts know the name"
    return Check("coordinator", "fail", f"{host} has no address: {error.strerror}", fix)


def _own_port(at: Address, held: ExitStack) -> Check:
    """Checks, on process 0, that it can listen at the address that the others connect to."""
    kept = bool(os.environ.get(env_vars.PORT_IS_KEPT))
    try:
        held.enter_context(listen(at, reserved=kept))
    except GShardError as error:
        fix = f"{env_vars.COORDINATOR}: an address of this machine, and a port that is free"
        return Check("coordinator", "fail", str(error), fix)
    alone = " (loopback: processes of this machine alone)" if is_loopback(at.host) else ""
    return Check("coordinator", "ok", f"this process can listen at {at}{alone}")


def reached(at: Address, seconds: float = SECONDS) -> Check:
    """Checks, on any other process, that process 0 answers."""
    try:
        _connect(at, seconds)
    except socket.gaierror as error:
        return _unknown(at.host, error)
    except ConnectionRefusedError:
        fix = "start process 0 first, at this address and port; then run this again"
        return Check("coordinator", "fail", f"{at.host} is there, but nobody listens at {at}", fix)
    except OSError as error:
        why = f"no answer in {seconds:g} s" if isinstance(error, TimeoutError) else error.strerror
        fix = f"see that this is the address of process 0, and that firewalls pass port {at.port}"
        return Check("coordinator", "fail", f"{at}: {why}", fix)
    return Check("coordinator", "ok", f"{at} answers")


def _connect(at: Address, seconds: float) -> None:
    """Connects to process 0, and retries because it may start to listen a moment later."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(at, timeout=seconds).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)
