"""What can be chosen for a run of the same setup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gshard._util.validation import MOST, flag, whole_number
from gshard.sharding.level import check_accumulate


@dataclass(frozen=True)
class Choices:
    """What can be chosen for a run of the same setup, beside its level and mesh.

    Attributes:
      micro_batch_size: rows that one device takes at a time.
      micro_batches: how many times in one step (k).
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
      offload: as in `shard_train_state`.
    """

    micro_batch_size: int = 1
    micro_batches: int = 1
    accumulate: str = "level"
    reshard_after_forward: bool | int = True
    offload: bool = False

    @property
    def of_step(self) -> dict[str, Any]:
        """Those that `make_train_step` and `promise` take, by name."""
        return {
            "micro_batches": self.micro_batches,
            "accumulate": self.accumulate,
            "reshard_after_forward": self.reshard_after_forward,
        }

    def __post_init__(self) -> None:
        whole_number("micro_batch_size", self.micro_batch_size, 1, " of rows", most=MOST)
        whole_number("micro_batches", self.micro_batches, 1, most=MOST)
        check_accumulate(self.accumulate)
        if not isinstance(self.reshard_after_forward, (bool, np.bool_)):
            neighbours = " of neighbours (or True or False)"
            whole_number("reshard_after_forward", self.reshard_after_forward, 1, neighbours)
        flag("offload", self.offload)
