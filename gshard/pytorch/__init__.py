"""The face of PyTorch's `ZeroRedundancyOptimizer`, on the core. It holds no collective.

`parameters` says what is optimized, `param_group` with which live hyperparameters, `grouped` makes
one optax transformation of it; `even` and `greedy` say where its state lies and step it.

May import: everything but `cli`.
Start reading: `zero_redundancy_optimizer`.
"""

from __future__ import annotations

from gshard.paddle.data_parallel import DataParallel
from gshard.pytorch.join import Join
from gshard.pytorch.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "DataParallel",
    "Join",
    "ZeroRedundancyOptimizer",
]
