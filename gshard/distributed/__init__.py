"""Lets processes join a job, agree and leave it; `launch` starts them on one machine.

May import: `_util`, `train_state`, `sharding`.
Start reading: `initialize`; for starting processes `launch.job` and `launch.spawn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gshard._util.errors import refuse_names
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

INSTEAD = {  # of the names in PyTorch's and Paddle's modules
    "all_gather": "Steps communicate by themselves; in your own functions use jax.lax.all_gather.",
    "all_reduce": "Steps communicate by themselves; in your own functions use jax.lax.psum.",
    "destroy_process_group": "Leave it out: the end of the program ends the group.",
    "get_rank": "Call gshard.distributed.process_index().",
    "get_world_size": "Call gshard.distributed.process_count(), or jax.device_count() for devices.",
    "init_parallel_env": "Call gshard.distributed.initialize().",
    "init_process_group": "Call gshard.distributed.initialize().",
    "is_initialized": "In a job of several processes process_count() is more than 1.",
}
if not TYPE_CHECKING:  # so that type checkers report misspelt names
    __getattr__ = refuse_names(__name__, INSTEAD)
