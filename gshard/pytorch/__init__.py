"""The API of PyTorch's `ZeroRedundancyOptimizer` and `Join`, on top of the core.

`parameters` and `param_group` are what `zero_redundancy_optimizer` trains, `even` and `greedy` its
two partitions: each shards the optimizer state and runs the update. `coupling` refuses optimizers
that `greedy` cannot split, `state_dict` matches saved states with new ones, `from_owners` sends
updated parameters, and `join` trains on uneven inputs.

May import: everything but `paddle` and `cli`.
Start reading: `zero_redundancy_optimizer`.
"""

from __future__ import annotations

from gshard.pytorch.distributed_data_parallel import DistributedDataParallel
from gshard.pytorch.join import Join
from gshard.pytorch.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from gshard.wrapped.data_parallel import DataParallel
from gshard.wrapped.state_dict import load, save

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "Join",
    "ZeroRedundancyOptimizer",
    "load",
    "save",
]


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
