"""Limits how many calls of compiled programs run at the same time on CPU devices."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
from jax import core

_MOST = 4  # of 32 that JAX lets run at once; 8 worked, 32 did not
_running: deque[jax.Array] = deque()  # a result of each of the last calls


def limit_in_flight(results: Any) -> None:
    """Waits for an earlier call if too many run, where the results are on several CPU devices.

    Calls that do not depend on each other, such as those of an evaluation, run at once, and take
    all threads (`cpu_threads`).
    """
    arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
    if not arrays or not _is_on_cpus(arrays[0]):  # all are on the devices of one mesh
        return
    _running.append(min(arrays, key=lambda x: x.size))
    if len(_running) > _MOST:
        oldest = _running.popleft()
        if not oldest.is_deleted():
            jax.block_until_ready(oldest)


def _is_on_cpus(x: jax.Array) -> bool:
    if isinstance(x, core.Tracer):
        return False
    devices = x.sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"
