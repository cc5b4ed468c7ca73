"""Environment variables by which `spawn` and `gshard launch` give a process its rank and job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from gshard._util.errors import GShardError
from gshard._util.validation import shown

COORDINATOR = "GSHARD_COORDINATOR"
NUM_PROCESSES = "GSHARD_NUM_PROCESSES"
PROCESS_ID = "GSHARD_PROCESS_ID"
LOCAL_PROCESS_ID = "GSHARD_LOCAL_PROCESS_ID"
HEARTBEAT_TIMEOUT = "GSHARD_HEARTBEAT_TIMEOUT"
START_TIMEOUT = "GSHARD_START_TIMEOUT"
AGREEMENT_TIMEOUT = "GSHARD_AGREEMENT_TIMEOUT"
RESTARTS = "GSHARD_RESTARTS"
PORT_IS_KEPT = "GSHARD_PORT_IS_KEPT"


class JobPosition(NamedTuple):
    """The position of a process in its job; fields that are not known are None."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


def read_position(environment: Mapping[str, str] = os.environ) -> JobPosition:
    """Reads this process's position from the environment variables."""
    return JobPosition(
        environment.get(COORDINATOR) or None,
        read_integer(NUM_PROCESSES, environment),
        read_integer(PROCESS_ID, environment),
    )


def read_integer(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Reads an integer from an environment variable; None if it is not set.

    Raises:
      GShardError: its value is not an integer.
    """
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise GShardError(f"the variable {name}={shown(text)} must be a whole number.") from None


def process_variables(
    coordinator_address: object,
    num_processes: int,
    process_id: int,
    local_process_id: int,
    *,
    heartbeat_timeout_seconds: int,
    initialization_timeout: int,
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
        RESTARTS: str(restarts),
        PORT_IS_KEPT: "1" if port_is_kept else "",
    }
