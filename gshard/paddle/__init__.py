"""The API of Paddle's group sharding, on top of the core. It calls no collective itself.

`group_sharded` wraps a model and its optimizer, `grad_scaler` is the loss scaler that it returns,
and `checkpoint` saves the pair. `DataParallel` and state dicts are in `gshard.wrapped`.

May import: everything but `pytorch` and `cli`.
Start reading: `group_sharded`.
"""

from __future__ import annotations

from gshard.distributed import barrier, new_group, spawn
from gshard.distributed import initialize as init_parallel_env
from gshard.distributed import process_count as get_world_size
from gshard.distributed import process_index as get_rank
from gshard.paddle.checkpoint import load_group_sharded_model, save_group_sharded_model
from gshard.paddle.group_sharded import group_sharded_parallel
from gshard.train_state.nonfinite import GradScaler
from gshard.wrapped.data_parallel import DataParallel, fused_allreduce_gradients
from gshard.wrapped.state_dict import load, save, set_state_dict, state_dict

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


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
