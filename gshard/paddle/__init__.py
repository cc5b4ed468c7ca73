"""The API of Paddle's group sharding, on top of the core. It calls no collective itself.

`group_sharded` wraps a model and its optimizer, `grad_scaler` is the loss scaler that it returns,
and `checkpoint` saves the pair. `DataParallel` and state dicts are in `gshard.wrapped`.

May import: everything but `pytorch` and `cli`.
Start reading: `group_sharded`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gshard._util.errors import refuse_names
from gshard.distributed import INSTEAD, barrier, new_group, spawn
from gshard.distributed import initialize as init_parallel_env
from gshard.distributed import process_count as get_world_size
from gshard.distributed import process_index as get_rank
from gshard.paddle.checkpoint import load_group_sharded_model, save_group_sharded_model
from gshard.paddle.group_sharded import group_sharded_parallel
from gshard.train_state.nonfinite import GradScaler
from gshard.wrapped.data_parallel import DataParallel, fused_allreduce_gradients
from gshard.wrapped.files import load, save
from gshard.wrapped.state_dict import set_state_dict, state_dict

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

_LEVEL = "Call group_sharded_parallel(model, optimizer, {!r})."
_PARALLEL = "Call group_sharded_parallel(model, optimizer, level)."
_CLIP, _BY_NORM = "Make the optimizer optax.chain(optax.{}, ...).", "clip_by_global_norm(clip_norm)"
_INSTEAD = INSTEAD | {
    "ClipGradByGlobalNorm": _CLIP.format(_BY_NORM),
    "ClipGradByNorm": "Clip each array in the optimizer: optax.chain("
    "optax.stateless_with_tree_map(lambda g, _: g * jnp.minimum(1, clip_norm / "
    "jnp.linalg.norm(g))), ...).",
    "ClipGradByValue": _CLIP.format("clip(max)"),
    "DataLoader": "Use gshard.DataLoader.",
    "DistributedBatchSampler": "gshard.DataLoader gives each process its own examples.",
    "DygraphShardingOptimizer": _LEVEL.format("os"),
    "GroupShardedOptimizerStage2": _LEVEL.format("os_g"),
    "GroupShardedStage2": _LEVEL.format("os_g"),
    "GroupShardedStage3": _LEVEL.format("p_g_os"),
    "ParallelEnv": "Call gshard.paddle.get_rank() and gshard.paddle.get_world_size().",
    "amp": "Pass scaler=gshard.GradScaler() to group_sharded_parallel; layers take dtype=.",
    "broadcast": "DataParallel and group_sharded_parallel take the model of the first process.",
    "distributed_model": _PARALLEL,
    "distributed_optimizer": _PARALLEL,
    "DistributedStrategy": _PARALLEL,
    "shard_optimizer": _PARALLEL,
    "fleet": "Call init_parallel_env() and group_sharded_parallel(model, optimizer, level).",
    "launch": "Start the program by `gshard launch --nproc_per_node n train.py`.",
    "nn": "Use the layers of flax.nnx or flax.linen.",
    "no_grad": "Leave it out: only model.backward computes gradients.",
    "recompute": "Use nnx.remat or jax.checkpoint.",
    "seed": "A seed is explicit in JAX: nnx.Rngs(seed), jax.random.key(seed).",
    "set_device": "Leave it out: a process uses its devices. `gshard launch --devices` chooses.",
    "optimizer": "Use the optimizers of optax, such as optax.adamw.",
}
if not TYPE_CHECKING:  # so that type checkers report misspelt names
    __getattr__ = refuse_names(__name__, _INSTEAD)


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
