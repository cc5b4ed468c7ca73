"""Joins this process to the others of its job, by `jax.distributed`."""

from __future__ import annotations

import inspect
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gshard._util import activity
from gshard._util.errors import CallOrderError, GShardError, did_you_mean, warn
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, shown
from gshard.distributed import env_vars
from gshard.distributed.broadcast import sum_over_devices
from gshard.distributed.env_vars import JobPosition
from gshard.distributed.exit import count_sigusr1_as_sigterm, exit_when_it_fails
from gshard.distributed.places import Server
from gshard.distributed.rendezvous import LOOPBACK, Address, address, listen, meet
from gshard.distributed.watchdog import HANG_TIMEOUT, Watchdog

HEARTBEAT_TIMEOUT, INITIALIZATION_TIMEOUT = 10, 300  # seconds
TIMEOUTS = {  # argument: variable, default, least
    "heartbeat_timeout_seconds": (env_vars.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT, 1),
    "initialization_timeout": (env_vars.START_TIMEOUT, INITIALIZATION_TIMEOUT, 1),
    "hang_timeout": (env_vars.HANG_TIMEOUT, HANG_TIMEOUT, 0),
}

_NEED = "Call gshard.distributed.initialize() first, before any other use of JAX in the program."
# Where more than one process runs under these, one that joins none of the others is a mistake.
_CLUSTERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_joined: list[tuple[JobPosition, JobPosition]] = []  # the arguments, and the resulting position
watchdogs: list[Watchdog] = []  # that of this process, once it has joined others
_known: list[tuple[int, int]] = []  # number of processes and rank, once JAX was given them


def warn_if_not_joined() -> None:
    """Warns in a process that was started with others and trains without them."""
    if jax.distributed.is_initialized():
        return
    processes = env_vars.read_integer(env_vars.NUM_PROCESSES) or 1
    if processes > 1:
        warn(
            f"this process was started as one of {processes}, and has not joined the others: each "
            "trains alone. Call gshard.distributed.initialize() before anything else uses JAX."
        )
    elif (found := env_vars.of_other_launchers()) is not None:
        warn(
            f"{found[0]}, say that this process is one of {found[1]}. gshard does not read "
            "them, so each process trains alone. Start the script by "
            "`gshard launch`, or call "
            "gshard.distributed.initialize(coordinator_address, num_processes, process_id)."
        )


@short_traceback
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int | None = None,
    initialization_timeout: int | None = None,
    hang_timeout: int | None = None,
    coordinator_bind_address: str | None = None,
    **secure: Any,
) -> None:
    """Joins this process to the others. Call it before anything else uses JAX.

    What is not given is read from the variables that `gshard launch` and `spawn` set, and then from
    what `jax.distributed` detects: Slurm, Open MPI, Kubernetes, cloud TPU. Without any of these the
    process is alone, and all of gshard works on its own devices.

    Once joined, a process that raises an error ends at once, without waiting for the others.
    A second call does nothing; one with another address, number of processes or rank is refused.

    Args:
      coordinator_address: `host:port` of process 0, which listens there and nowhere else. A
        loopback address serves processes of one machine.
      num_processes: number of processes in the job.
      process_id: this process's rank, from 0.
      heartbeat_timeout_seconds: seconds without a heartbeat after which a process counts as dead;
        10 by default.
      initialization_timeout: seconds to wait for all processes to start; 300 by default.
      hang_timeout: seconds that a process may wait for the others, in a step or a call of gshard,
        before the job is ended with the stacks of all processes; 600 by default, 0 for no limit.
      coordinator_bind_address: `host:port` at which process 0 listens, where that differs from the
        address the others use. With a detected cluster JAX listens on every interface unless
        this is given.
      **secure: `mtls_cert_file`, `mtls_key_file`, `mtls_ca_file`, ... of
        `jax.distributed.initialize`, in versions of JAX that have them: TLS with certificates on
        both sides between the processes and the coordinator.

    Raises:
      NotArrivedError: some processes did not start in time; the message lists them.
      GShardError: a rank is out of range, process 0 cannot listen at the address, JAX has already
        started, or an earlier call was given other values.

    Example:
      >>> gshard.distributed.initialize()  # before anything else uses JAX
      >>> gshard.distributed.process_count()
      1
    """
    asked = JobPosition(coordinator_address, num_processes, process_id)
    _check_secure(secure)
    by_the_user = jax.distributed.is_initialized() and not watchdogs  # by a call of the user's own
    if _joined and not by_the_user:
        _check_again(asked)
        return
    options = read_timeouts(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        initialization_timeout=initialization_timeout,
        hang_timeout=hang_timeout,
    )
    position = resolve_position(asked)
    if position.num_processes != 1 and not by_the_user:
        # Otherwise several processes on CPUs cannot talk; without CPU devices it has no effect.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        join = _join_detected if position.num_processes is None else _join
        join(position, coordinator_bind_address, **options, **secure)
    elif by_the_user:
        _watch(Watchdog(position.process_id, options["hang_timeout"]))
    _joined[:] = [(asked, position)]
    if not jax.distributed.is_initialized():
        _known[:] = [(1, 0)]
        return
    exit_when_it_fails()
    if by_the_user:
        _known.clear()  # an earlier call may have found no other process
    elif position.num_processes is not None:
        _known[:] = [(int(position.num_processes), int(position.process_id or 0))]


def read_timeouts(**given: int | None) -> dict[str, int]:
    """Returns the timeouts that are given; the others from the variables, or by default."""
    found = {}
    for name, (variable, default, least) in TIMEOUTS.items():
        value = given.get(name)
        if value is None:
            found[name] = env_vars.read_seconds(variable, default, least)
        else:
            found[name] = check_integer(name, value, least, " of seconds")
    return found


def resolve_position(asked: JobPosition) -> JobPosition:
    """Returns the position from arguments, then from variables; all None if neither has any."""
    given = {name: value for name, value in asked._asdict().items() if value is not None}
    position = env_vars.read_position()._replace(**given)
    if position == (None, None, None):
        return position
    variables = (env_vars.COORDINATOR, env_vars.NUM_PROCESSES, env_vars.PROCESS_ID)
    # The source of each value, for messages.
    source = {
        n: n if n in given else v for n, v in zip(JobPosition._fields, variables, strict=True)
    }
    for name in ("num_processes", "process_id"):
        if getattr(position, name) is None:
            others = {source[n]: v for n, v in position._asdict().items() if v is not None}
            raise GShardError(
                f"initialize: {name} is missing, and the others are {others}. Give "
                "coordinator_address, num_processes and process_id together, or none of them."
            )
    count = check_integer(source["num_processes"], position.num_processes, 1)
    rank = check_integer(source["process_id"], position.process_id, 0)
    if rank >= count:
        raise GShardError(
            f"{source['process_id']}={rank} is not a rank of {source['num_processes']}={count}. "
            f"Ranks run from 0 to {count - 1}."
        )
    if count > 1 and position.coordinator_address is None:
        raise GShardError(
            f"initialize: coordinator_address is missing: with {count} processes give "
            f"'host:port' of process 0, such as '{LOOPBACK}:29500' on one machine."
        )
    if position.coordinator_address is not None:
        address(position.coordinator_address, source["coordinator_address"])
    return JobPosition(position.coordinator_address, count, rank)


def _check_again(asked: JobPosition) -> None:
    first, position = _joined[0]
    for name, again, before, now in zip(JobPosition._fields, asked, first, position, strict=True):
        if again is not None and again not in (before, now):
            raise GShardError(
                f"initialize({name}={shown(again)}) was called, but this process has "
                f"already joined with {name}={shown(before if now is None else now)}. Leave this "
                "call out, or give it the same values."
            )


def _check_secure(secure: dict[str, Any]) -> None:
    parameters = inspect.signature(jax.distributed.initialize).parameters
    known = [name for name in parameters if "mtls" in name or "secure" in name]
    for name in secure:
        if name not in known:
            meant = did_you_mean(name, [*inspect.signature(initialize).parameters, *known])
            old = f" JAX {jax.__version__} has no such option." if "mtls" in name else ""
            raise GShardError(f"initialize has no argument {name!r}.{old}{meant}")


def _jax_has_started() -> bool:
    """Whether JAX already has devices; it then refuses to join others before it reads anything."""
    try:
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:  # the arguments are missing
        return False
    except RuntimeError:
        pass
    return True


def _join(
    position: JobPosition, bind_address: str | None, hang_timeout: int, **options: Any
) -> None:
    at = address(position.coordinator_address, "coordinator_address")
    bind = at if bind_address is None else address(bind_address, "coordinator_bind_address")
    count, rank = int(position.num_processes or 1), int(position.process_id or 0)
    if _jax_has_started():
        raise CallOrderError(f"initialize: JAX has already started in process {rank}. {_NEED}")
    reserved = env_vars.read_integer(env_vars.PORT_IS_KEPT) is not None
    servers: list[Server] = []

    def serve() -> dict[str, Any]:
        servers.append(Server.listening(count, listen(Address(bind.host, 0))))
        return {"watchdog": servers[0].invitation}

    told = meet(
        bind if rank == 0 else at,
        count,
        rank,
        options["initialization_timeout"],
        reserved,
        tell=serve,
    )
    _initialize(
        coordinator_address=str(at),
        num_processes=count,
        process_id=rank,
        coordinator_bind_address=str(bind) if rank == 0 else None,  # JAX: every interface
        cluster_detection_method="deactivate",  # the arguments are complete
        **options,
    )
    port, token = told["watchdog"]
    _watch(Watchdog(rank, hang_timeout, Address(at.host, port), token, *servers))


def clusters_of_several() -> list[str]:
    """What a cluster says of several processes, such as `SLURM_STEP_NUM_TASKS=2`."""
    return [f"{v}={n}" for v in _CLUSTERS if (n := os.environ.get(v)) not in (None, "", "1")]


def _join_detected(
    _: JobPosition, bind_address: str | None, hang_timeout: int, **options: Any
) -> None:
    """Joins the job that JAX detects; if it detects none, this process is alone."""
    several = clusters_of_several()
    if _jax_has_started():
        if several:
            raise CallOrderError(
                f"initialize: JAX has already started, and {several[0]} says that this "
                f"process is one of several. {_NEED}"
            )
        return
    if not several and "1" in map(os.environ.get, _CLUSTERS):
        return  # alone; JAX would listen at the port that all steps of a Slurm job have
    try:
        _initialize(coordinator_bind_address=bind_address, **options)
        _watch(Watchdog(None, hang_timeout))  # no rendezvous tells where process 0 serves
    except Exception as error:
        if isinstance(error, GShardError) and not isinstance(error, CallOrderError):
            raise  # of the GPUs; it says what to do
        if "coordinator_address" not in str(error):
            said = error if isinstance(error, GShardError) else f"{type(error).__name__}: {error}"
            why = f"JAX has detected a cluster, and joining its processes failed ({said})."
        elif several:
            why = (
                f"{several[0]} says that this process is one of several, but not at which address "
                "they meet, so JAX cannot detect the others."
            )
        else:
            return
        raise CallOrderError(
            f"initialize: {why} Give coordinator_address, num_processes and process_id; to run "
            "this process alone, give num_processes=1, process_id=0."
        ) from error


def _watch(watchdog: Watchdog) -> None:
    watchdog.start()
    watchdogs.append(watchdog)


def _initialize(**arguments: Any) -> None:
    before = os.environ.get("grpc_proxy")
    has_proxy = any(os.environ.get(f"{name}_proxy") for name in ("grpc", "https", "http"))
    if has_proxy:  # gRPC would ask it for the coordinator, and hang; JAX warns of mere names
        os.environ["grpc_proxy"] = ""
    try:
        jax.distributed.initialize(local_device_ids=env_vars.gpus_of_task(), **arguments)
    except RuntimeError as error:
        fix = f" {_NEED}" if "must be called before" in str(error) else ""
        raise CallOrderError(f"initialize could not start: {error}{fix}") from error
    finally:
        if has_proxy:
            del os.environ["grpc_proxy"]
        if before is not None:
            os.environ["grpc_proxy"] = before
    count_sigusr1_as_sigterm()


def process_index() -> int:
    """The rank of this process; like `process_count`, it avoids starting JAX.

    Returns:
      An integer from 0 to `process_count() - 1`.

    Example:
      >>> gshard.distributed.process_index()
      0
    """
    known = _known_before_jax()
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
    known = _known_before_jax()
    return jax.process_count() if known is None else known[0]


def barrier() -> None:
    """Waits until every process has called it and their devices have finished their work.

    In a job of one process it returns at once.

    Raises:
      GShardError: the processes make different calls.
      ConnectionError: another process has left the job.

    Example:
      >>> gshard.distributed.barrier()
    """
    if process_count() > 1:
        with activity.doing("barrier()", waits=True):
            activity.meet(range(process_count()), "barrier()")
            sum_over_devices(np.zeros(1, np.uint32), Mesh(np.array(jax.devices()), ("all",)))


def _known_before_jax() -> tuple[int, int] | None:
    """Returns the number of processes and the rank, if both are certain before JAX has devices."""
    # Only the runtime of a TPU can know of other processes than these.
    if _known and (_known[0][0] > 1 or getattr(jax.config, "jax_platforms", None) == "cpu"):
        return _known[0]
    return None
