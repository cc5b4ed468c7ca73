"""Operations of a model whose sequences are sharded over a mesh axis, and their collectives.

In a train step of gshard they take full sequences, and the step runs them on each device's slice.
In a `shard_map` of your own they take the device's slice. Where the axis is not bound
(`model.init`, one device) they compute the ordinary result.

May import: `_util`.
Start reading: `attention`, then `ring` and `blocks`.
"""

from __future__ import annotations

from gshard.sequence.attention import attention
from gshard.sequence.collectives import index, size
from gshard.sequence.order import positions, shift_left, shift_right, unzigzag, zigzag
from gshard.sequence.reductions import mean, norm, sum

__all__ = [
    "attention",
    "index",
    "mean",
    "norm",
    "positions",
    "shift_left",
    "shift_right",
    "size",
    "sum",
    "unzigzag",
    "zigzag",
]


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
