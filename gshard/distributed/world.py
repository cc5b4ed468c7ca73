"""Who this process is among those of its job, and waiting for all of them."""

from __future__ import annotations

import jax
from jax.experimental import multihost_utils

_told: list[tuple[int, int]] = []  # number of processes and rank, once this process has joined


def joined(processes: int, rank: int) -> None:
    """Notes what JAX was told, so that asking does not start it."""
    _told[:] = [(processes, rank)]


def get_rank() -> int:
    """This process's rank, from 0. Does not start JAX where `get_world_size` does not."""
    known = _known()
    return jax.process_index() if known is None else known[1]


def get_world_size() -> int:
    """The number of processes.

    After an `init_parallel_env` that was told it, by arguments or by gshard's variables, and on
    CPUs alone, this does not start JAX: `virtual_devices` may still come.
    """
    known = _known()
    return jax.process_count() if known is None else known[0]


def barrier() -> None:
    """Waits until every process has called it, and until their devices have done what was asked.

    Alone in its job, a process goes on at once.
    """
    if get_world_size() > 1:
        multihost_utils.sync_global_devices("gshard.barrier")


def _known() -> tuple[int, int] | None:
    """Number of processes and rank, where both are certain before JAX has devices."""
    if not _told:
        return None
    alone = _told[0][0] == 1
    # Of its own accord only the runtime of a TPU knows of other processes.
    certain = not alone or getattr(jax.config, "jax_platforms", None) == "cpu"
    return _told[0] if certain else None
