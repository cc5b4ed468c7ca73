"""The API of PyTorch's `ZeroRedundancyOptimizer` and `Join`, on top of the core.

`parameters` and `param_group` are what `zero_redundancy_optimizer` trains, `even` and `greedy` its
two partitions: each shards the optimizer state and runs the update. `coupling` finds optimizers
that `greedy` cannot split, `state_dict` matches saved states with new ones, `from_owners` sends
updated parameters, and `join` trains on uneven inputs.

May import: everything but `paddle` and `cli`.
Start reading: `zero_redundancy_optimizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gshard._util.errors import refuse_names
from gshard.distributed import INSTEAD
from gshard.pytorch.distributed_data_parallel import DistributedDataParallel
from gshard.pytorch.join import Join
from gshard.pytorch.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from gshard.wrapped.files import load, save

__all__ = [
    "DistributedDataParallel",
    "Join",
    "ZeroRedundancyOptimizer",
    "load",
    "save",
]

_SHARDED = 'gshard.shard_train_state(state, mesh, "fsdp") shards parameters as well.'
_MESH = "Call gshard.make_mesh()."
_SCALER = "Pass scaler=gshard.GradScaler() to gshard.make_train_step."
_INSTEAD = INSTEAD | {
    "DDP": "It is DistributedDataParallel.",
    "DataLoader": "Use gshard.DataLoader.",
    "DataParallel": "It is DistributedDataParallel, also for one process with several devices.",
    "DistributedSampler": "gshard.DataLoader gives each process its own examples, with no sampler.",
    "FSDP": _SHARDED,
    "FullyShardedDataParallel": _SHARDED,
    "GradScaler": _SCALER,
    "amp": f"{_SCALER} bfloat16 is dtype=jnp.bfloat16 of the layers, and needs no scaler.",
    "autocast": "Give the layers dtype=jnp.bfloat16; parameters stay in float32.",
    "barrier": "Call gshard.distributed.barrier().",
    "broadcast": "DistributedDataParallel takes the model of the first process by itself.",
    "clip_grad_norm_": "Make the optimizer optax.chain(optax.clip_by_global_norm(max_norm), ...).",
    "fully_shard": _SHARDED,
    "new_group": "Call gshard.distributed.new_group(device_numbers).",
    "optim": "Use the optimizers of optax, such as optax.adamw.",
    "DeviceMesh": _MESH,
    "MixedPrecision": 'Pass precision="bfloat16" to gshard.shard_train_state.',
    "ShardingStrategy": _SHARDED,
    "StateDictType": "gshard.Checkpointer saves shards, gshard.full_params gathers parameters.",
    "all_gather_object": "Call jax.experimental.multihost_utils.process_allgather(array).",
    "broadcast_object_list": "Call jax.experimental.multihost_utils.broadcast_one_to_all(array).",
    "checkpoint": "Use nnx.remat, nn.remat or jax.checkpoint; gshard.Checkpointer saves states.",
    "clip_grad_value_": "Make the optimizer optax.chain(optax.clip(max), ...).",
    "init_device_mesh": _MESH,
    "launch": "Start the program by `gshard launch --nproc_per_node n train.py`.",
    "lr_scheduler": 'Set opt.param_groups[0]["lr"] before a step, or pass an optax schedule.',
    "manual_seed": "A seed is explicit in JAX: nnx.Rngs(seed), jax.random.key(seed).",
    "nn": "Use the layers of flax.nnx or flax.linen.",
    "no_grad": "Leave it out: only backward and value_and_grad compute gradients.",
    "set_device": "Leave it out: a process uses its devices. `gshard launch --devices` chooses.",
    "spawn": "Call gshard.distributed.spawn(function, nprocs=n).",
}
if not TYPE_CHECKING:  # so that type checkers report misspelt names
    __getattr__ = refuse_names(__name__, _INSTEAD)


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
