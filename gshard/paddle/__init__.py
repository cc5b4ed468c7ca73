"""Paddle's names for what gshard does: a thin face over the core, with no collective of its own.

`group_sharded`: the one call; `data_parallel`: the same without division. `wrapped`: what a model
can do then; `backward`, `accumulation`: its gradients from one call to the next; `phases`,
`on_model`: what is compiled. `wrapped_optimizer`, `scaling`: what steps. `checkpoint`: a directory.
`models`, `groups`, `excluded`, `named`, `reached`: arguments and values in gshard's terms.

May import: everything but `pytorch` and `cli`.
Start reading: `group_sharded`.
"""

from __future__ import annotations

from gshard.distributed import barrier, new_group, spawn
from gshard.distributed import initialize as init_parallel_env
from gshard.distributed import process_count as get_world_size
from gshard.distributed import process_index as get_rank
from gshard.paddle.checkpoint import load_group_sharded_model, save_group_sharded_model
from gshard.paddle.data_parallel import DataParallel, fused_allreduce_gradients
from gshard.paddle.group_sharded import group_sharded_parallel
from gshard.paddle.state_dict import load, save, set_state_dict, state_dict
from gshard.train_state.loss_scale import GradScaler

__all__ = [
    "DataParallel",
    "GradScaler",
    "barrier",
    "fused_allreduce_gradients",
    "get_rank",
    "get_world_size",
    "group_sharded_parallel",
    "init_parallel_env",
    "load",
    "load_group_sharded_model",
    "new_group",
    "save",
    "save_group_sharded_model",
    "set_state_dict",
    "spawn",
    "state_dict",
]
