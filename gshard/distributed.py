"""Several processes: starting them, and who is who. `jax.distributed` is the engine."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from gshard.arguments import dimension, shown
from gshard.errors import GShardError

_started: list[tuple[str | None, int, int]] = []


def init_parallel_env(
    coordinator: str | None = None,
    num_processes: int = 1,
    process_id: int = 0,
    *,
    heartbeat_timeout: int = 10,
    start_timeout: int = 300,
) -> None:
    """Joins this process to the others. Call it before anything else uses JAX; again is a no-op.

    Args:
      coordinator: `host:port` of process 0, which listens there. Loopback stays on this machine.
      num_processes: of the whole job; 1 needs nothing else.
      process_id: this process's rank, from 0.
      heartbeat_timeout: seconds after which a silent process counts as dead.
      start_timeout: seconds to wait for all processes to arrive.

    Raises:
      GShardError: for ranks that cannot be, or when JAX has already started.
    """
    asked = (coordinator, num_processes, process_id)
    if _started:
        if _started[0] != asked:
            raise GShardError(
                f"init_parallel_env{asked} was called, but this process has already joined with "
                f"{_started[0]}."
            )
        return
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise GShardError(
            f"process_id={process_id} is not a rank of num_processes={num_processes}. Ranks run "
            "from 0 to num_processes - 1."
        )
    if num_processes > 1:
        if coordinator is None or ":" not in coordinator:
            raise GShardError(
                f"coordinator={coordinator!r} must be 'host:port' of process 0 when there are "
                f"{num_processes} processes."
            )
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                # JAX listens on every interface unless told.
                coordinator_bind_address=coordinator if process_id == 0 else None,
                heartbeat_timeout_seconds=heartbeat_timeout,
                initialization_timeout=start_timeout,
            )
        except RuntimeError as error:
            raise GShardError(
                f"init_parallel_env could not start: {error} Call it first, before any other use "
                "of JAX in the program."
            ) from error
    _started.append(asked)


def get_rank() -> int:
    """This process's rank, from 0."""
    return jax.process_index()


def get_world_size() -> int:
    """The number of processes."""
    return jax.process_count()


def new_group(devices: Sequence[int]) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices with these global indices, for `make_mesh(devices=...)`.

    Raises:
      GShardError: for an index that does not exist or is named twice.
    """
    every = jax.devices()
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        raise GShardError(f"new_group({shown(devices)}): pass a list of device indices.")
    indices = list(devices)
    if not indices or len(set(indices)) < len(indices):
        raise GShardError(f"new_group({indices}): name at least one device, each once.")
    for index in indices:
        if dimension(index, len(every)) != index:
            raise GShardError(
                f"new_group({indices}): {index!r} is no device. There are {len(every)}: 0 to "
                f"{len(every) - 1}."
            )
    return [every[index] for index in indices]
