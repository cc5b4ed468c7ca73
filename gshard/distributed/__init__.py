"""Lets processes join a job, agree and leave it; `launch` starts them on one machine.

May import: `_util`, `train_state`, `sharding`.
Start reading: `initialize`; for starting processes `launch.job` and `launch.spawn`.
"""

from __future__ import annotations

from gshard.distributed.exit import PREEMPTED_EXIT_CODE, preempted, until_preempted
from gshard.distributed.initialize import barrier, initialize, process_count, process_index
from gshard.distributed.launch.spawn import ProcessFailedError, Spawned, spawn
from gshard.distributed.rendezvous import NotArrivedError
from gshard.sharding.mesh import new_group

__all__ = [
    "NotArrivedError",
    "PREEMPTED_EXIT_CODE",
    "ProcessFailedError",
    "Spawned",
    "barrier",
    "initialize",
    "new_group",
    "preempted",
    "process_count",
    "process_index",
    "spawn",
    "until_preempted",
]
