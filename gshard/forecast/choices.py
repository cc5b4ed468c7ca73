"""What can be chosen for a run of the same setup."""

from __future__ import annotations

from dataclasses import dataclass

from gshard.arguments import whole_number


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

    def __post_init__(self) -> None:
        whole_number("micro_batch_size", self.micro_batch_size, 1, " of rows")
        whole_number("micro_batches", self.micro_batches, 1)
