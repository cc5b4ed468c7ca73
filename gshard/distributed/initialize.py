"""Joins this process to the others of its job, by `jax.distributed`."""

from __future__ import annotations

import inspect
import os
from typing import Any

import jax
from jax.experimental import multihost_utils

from gshard._util.errors import CallOrderError, GShardError, did_you_mean
from gshard._util.validation import check_integer, shown
from gshard.distributed import env_vars
from gshard.distributed.env_vars import JobPosition
from gshard.distributed.exit import exit_when_it_fails
from gshard.distributed.rendezvous import LOOPBACK, address, meet

HEARTBEAT_TIMEOUT, INITIALIZATION_TIMEOUT = 10, 300  # seconds

_NEED = "Call gshard.distributed.initialize() first, before any other use of JAX in the program."
# Where more than one process runs under these, one that joins none of the others is a mistake.
_CLUSTERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_joined: list[tuple[JobPosition, JobPosition]] = []  # what was asked for, and what it came to


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int | None = None,
    initialization_timeout: int | None = None,
    coordinator_bind_address: str | None = None,
    **secure: Any,
) -> None:
    """Joins this process to the others. Call it before anything else uses JAX; again is a no-op.

    What is not given is read from the variables that `gshard launch` and `spawn` set, and then from
    what `jax.distributed` detects: Slurm, Open MPI, Kubernetes, cloud TPU. Without any of these the
    process is alone, and all of gshard works on its own devices.

    Once joined, a process that fails ends at once instead of waiting for the others at exit.

    Args:
      coordinator_address: `host:port` of process 0, which listens there and nowhere else. A
        loopback address serves processes of one machine.
      num_processes: number of processes in the job.
      process_id: this process's rank, from 0.
      heartbeat_timeout_seconds: seconds without a heartbeat after which a process counts as dead;
        10 by default.
      initialization_timeout: seconds to wait for all processes to start; 300 by default.
      coordinator_bind_address: `host:port` at which process 0 listens, where that differs from the
        address the others use. With a detected cluster JAX listens on every interface unless
        this is given.
      **secure: `mtls_cert_file`, `mtls_key_file`, `mtls_ca_file`, ... of
        `jax.distributed.initialize`, in versions of JAX that have them: TLS with certificates on
        both sides between the processes and the coordinator.

    Raises:
      NotArrivedError: some processes did not start in time; the message lists them.
      GShardError: a rank is out of range, process 0 cannot listen at the address, or JAX has
        already started.

    Example:
      >>> gshard.distributed.initialize()  # before anything else uses JAX
      >>> gshard.distributed.process_count()
      1
    """
    asked = JobPosition(coordinator_address, num_processes, process_id)
    if _joined:
        _check_again(asked)
        return
    timeouts = (
        _seconds(
            "heartbeat_timeout_seconds",
            heartbeat_timeout_seconds,
            env_vars.HEARTBEAT_TIMEOUT,
            HEARTBEAT_TIMEOUT,
        ),
        _seconds(
            "initialization_timeout",
            initialization_timeout,
            env_vars.START_TIMEOUT,
            INITIALIZATION_TIMEOUT,
        ),
    )
    _check_secure(secure)
    place = resolve_position(asked)
    by_the_user = jax.distributed.is_initialized()  # by a call of the user's own
    if place.num_processes != 1 and not by_the_user:
        # Otherwise several processes on CPUs cannot talk; without CPU devices it has no effect.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if place.num_processes is None:
            _join_detected(*timeouts, coordinator_bind_address, secure)
        else:
            _join(place, *timeouts, coordinator_bind_address, secure)
    _joined.append((asked, place))
    if not jax.distributed.is_initialized():
        note_joined(1, 0)
        return
    exit_when_it_fails()
    if place.num_processes is not None and not by_the_user:
        note_joined(int(place.num_processes), int(place.process_id or 0))


# ---- who this process is -------------------------------------------------------------------------


def resolve_position(asked: JobPosition) -> JobPosition:
    """Returns the position from arguments, then from variables; all None if neither has any."""
    told = {name: value for name, value in asked._asdict().items() if value is not None}
    place = env_vars.read_position()._replace(**told)
    if place == (None, None, None):
        return place
    # The source of each value, for messages.
    variables = (env_vars.COORDINATOR, env_vars.NUM_PROCESSES, env_vars.PROCESS_ID)
    source = {n: n if n in told else v for n, v in zip(JobPosition._fields, variables, strict=True)}
    for name, value in list(place._asdict().items())[1:]:
        if value is None:
            given = {source[n]: v for n, v in place._asdict().items() if v is not None}
            raise GShardError(
                f"initialize: {name} is missing, and the others are {given}. Give "
                "coordinator_address, num_processes and process_id together, or none of them."
            )
    count = check_integer(source["num_processes"], place.num_processes, 1)
    rank = check_integer(source["process_id"], place.process_id, 0)
    if rank >= count:
        raise GShardError(
            f"{source['process_id']}={rank} is not a rank of {source['num_processes']}={count}. "
            f"Ranks run from 0 to {count - 1}."
        )
    if count > 1 and place.coordinator_address is None:
        raise GShardError(
            f"initialize: coordinator_address is missing: with {count} processes give "
            f"'host:port' of process 0, such as '{LOOPBACK}:29500' on one machine."
        )
    if place.coordinator_address is not None:
        address(place.coordinator_address, source["coordinator_address"])
    return JobPosition(place.coordinator_address, count, rank)


def _check_again(asked: JobPosition) -> None:
    first, place = _joined[0]
    for name, again, before, now in zip(JobPosition._fields, asked, first, place, strict=True):
        if again is not None and again not in (before, now):
            raise GShardError(
                f"initialize({name}={shown(again)}) was called, but this process has "
                f"already joined with {name}={shown(before if now is None else now)}."
            )


def _seconds(name: str, value: int | None, variable: str, default: int) -> int:
    if value is None:
        name, value = variable, env_vars.read_integer(variable)
    return default if value is None else check_integer(name, value, 1, " of seconds")


def _check_secure(secure: dict[str, Any]) -> None:
    known = [name for name in _parameters() if "mtls" in name or "secure" in name]
    for name in secure:
        if name not in known:
            meant = did_you_mean(name, [*inspect.signature(initialize).parameters, *known])
            old = f" JAX {jax.__version__} has no such option." if "mtls" in name else ""
            raise GShardError(f"initialize has no argument {name!r}.{old}{meant}")


def _parameters() -> list[str]:
    return list(inspect.signature(jax.distributed.initialize).parameters)


def _jax_has_started() -> bool:
    """Whether JAX already has devices; it then refuses to join others before it reads anything."""
    try:
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:  # it was told nothing
        return False
    except RuntimeError:
        pass
    return True


# ---- joining -------------------------------------------------------------------------------------


def _join(
    place: JobPosition, heartbeat: int, start: int, bind_address: str | None, secure: dict[str, Any]
) -> None:
    at = address(place.coordinator_address, "coordinator_address")
    bind = at if bind_address is None else address(bind_address, "coordinator_bind_address")
    count, rank = int(place.num_processes or 1), int(place.process_id or 0)
    if _jax_has_started():
        raise CallOrderError(f"initialize: JAX has already started in process {rank}. {_NEED}")
    _reach_directly(at.host)
    kept = env_vars.read_integer(env_vars.PORT_IS_KEPT) is not None
    meet(bind if rank == 0 else at, count, rank, start, kept)
    _initialize(
        coordinator_address=str(at),
        num_processes=count,
        process_id=rank,
        coordinator_bind_address=str(bind) if rank == 0 else None,  # JAX: every interface
        cluster_detection_method="deactivate",  # what was said is complete
        heartbeat_timeout_seconds=heartbeat,
        initialization_timeout=start,
        **secure,
    )


def _reach_directly(host: str) -> None:
    """Keeps gRPC from asking a web proxy for the coordinator, which hangs."""
    if any(name.lower().endswith("_proxy") and os.environ[name] for name in os.environ):
        without = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = f"{without},{host}" if without else host


def _join_detected(
    heartbeat: int, start: int, bind_address: str | None, secure: dict[str, Any]
) -> None:
    """Joins the job that JAX detects; if it detects none, this process is alone."""
    several = [f"{v}={n}" for v in _CLUSTERS if (n := os.environ.get(v)) not in (None, "", "1")]
    if _jax_has_started():
        if several:
            raise CallOrderError(
                f"initialize: JAX has already started, and {several[0]} says that this "
                f"process is one of several. {_NEED}"
            )
        return
    try:
        _initialize(
            coordinator_bind_address=bind_address,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=start,
            **secure,
        )
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise GShardError(f"initialize: {error}") from error
        if several:
            raise GShardError(
                f"initialize: {several[0]} says that this process is one of several, but "
                "not where they meet, so that JAX detects none. Give coordinator_address, "
                "num_processes and process_id; with num_processes=1, process_id=0 this process is "
                "alone."
            ) from error


def _initialize(**arguments: Any) -> None:
    try:
        jax.distributed.initialize(**arguments)
    except RuntimeError as error:
        fix = f" {_NEED}" if "must be called before" in str(error) else ""
        raise CallOrderError(f"initialize could not start: {error}{fix}") from error


_told: list[tuple[int, int]] = []  # number of processes and rank, once this process has joined


def note_joined(processes: int, rank: int) -> None:
    """Records what was passed to JAX, so that later questions do not start JAX."""
    _told[:] = [(processes, rank)]


def process_index() -> int:
    """The rank of this process; like `process_count`, it avoids starting JAX.

    Returns:
      An integer from 0 to `process_count() - 1`.

    Example:
      >>> gshard.distributed.process_index()
      0
    """
    known = _known()
    return jax.process_index() if known is None else known[1]


def process_count() -> int:
    """The number of processes in the job.

    When `initialize` got this number from its arguments or from gshard's environment variables,
    and JAX uses CPUs only, this does not start JAX: `virtual_devices` can still be called after it.

    Returns:
      The number of processes, 1 for a process on its own.

    Example:
      >>> batch_size = 64 // gshard.distributed.process_count()  # examples of this process
      >>> batch_size
      64
    """
    known = _known()
    return jax.process_count() if known is None else known[0]


def barrier() -> None:
    """Waits until every process has called it and their devices have finished their work.

    In a job of one process it returns at once.

    Example:
      >>> gshard.distributed.barrier()
    """
    if process_count() > 1:
        multihost_utils.sync_global_devices("gshard.distributed.barrier")


def _known() -> tuple[int, int] | None:
    """Returns the number of processes and the rank, if both are certain before JAX has devices."""
    if not _told:
        return None
    alone = _told[0][0] == 1
    # Of its own accord only the runtime of a TPU knows of other processes.
    certain = not alone or getattr(jax.config, "jax_platforms", None) == "cpu"
    return _told[0] if certain else None
