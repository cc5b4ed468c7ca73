"""Which rows of the data make up which batch, and which of these are a process's own.

Both follow from a few numbers alone, so any number of processes, and a process that starts again,
find the same.
"""

from __future__ import annotations

import numpy as np

from gshard._util.errors import GShardError
from gshard.data.batch import places_of
from gshard.sharding.plan import Plan


class Order:
    """The rows of every batch of every epoch."""

    def __init__(self, length: int, batch_size: int, seed: int, shuffle: bool, drop: bool):
        self.length, self.batch_size, self.drop = length, batch_size, drop
        self._seed, self._shuffle = seed, shuffle
        self._kept: tuple[int, np.ndarray] | None = None

    @property
    def batches(self) -> int:
        """Batches of one epoch."""
        return self.length // self.batch_size if self.drop else -(-self.length // self.batch_size)

    def rows(self, epoch: int, position: int) -> np.ndarray:
        """The rows of one global batch, int64, in order.

        An epoch's permutation takes 8 bytes for each row of the data, kept until the next one's.
        It is that of NumPy's generator, whose stream a new version of NumPy may change.
        """
        start = position * self.batch_size
        stop = min(start + self.batch_size, self.length)
        if not self._shuffle:
            return np.arange(start, stop)
        kept = self._kept
        if kept is None or kept[0] != epoch:
            entropy = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
            shuffled = np.random.default_rng(entropy).permutation(self.length)
            self._kept = kept = (epoch, shuffled)
        return kept[1][start:stop]

    def check(self, places: int) -> None:
        """Checks that every batch divides over the devices that take rows.

        Raises:
          GShardError: names the nearest sizes.
        """
        size, length = self.batch_size, self.length
        if size % places:
            near = max(places, size // places * places)
            raise GShardError(
                f"batch_size={size}, the examples of the global batch, is not a multiple of the "
                f"{places} devices that they are sharded over. Use {near} or {near + places}."
            )
        if self.drop and length < size:
            raise GShardError(
                f"the source has {length} rows, fewer than batch_size={size}, and what does not "
                "fill a batch is dropped: there is no batch. Use a smaller batch_size, or "
                "drop_remainder=False."
            )
        if not self.drop and length % places:
            near = length // places * places
            fewer = f"{near} or " if near else ""
            raise GShardError(
                f"drop_remainder=False: the last batch has {length % size} examples, which is "
                f"not a multiple of the {places} devices. Give {fewer}{near + places} examples "
                f"instead of {length} (examples that fill up can weigh 0, gshard.Weighted), or "
                "drop the remainder."
            )


def own_part(plan: Plan, rows: np.ndarray, process: int) -> np.ndarray:
    """Those rows of a global batch that lie on devices of this process, in order."""
    each = rows.size // plan.group.devices
    places = rows.reshape(plan.group.devices, each)
    return places[sorted(places_of(plan)[process])].reshape(-1)
