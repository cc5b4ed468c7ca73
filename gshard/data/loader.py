"""`DataLoader`: makes global batches of random-access data, in a reproducible order.

The global batch is the same for any number of processes: each reads its own examples of it. The
position of a loader is two numbers, so that training can continue where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gshard._util.errors import CallOrderError, GShardError
from gshard._util.pytree import differences
from gshard._util.validation import check_integer, flag, shown
from gshard.data.batch import (
    check_plan,
    local_positions,
    positions_by_process,
    put_batch,
    shard_batch,
)
from gshard.data.consistency import compare_loaders
from gshard.data.prefetch import map_ahead
from gshard.data.source import Source
from gshard.sharding.plan import Plan


class DataLoader:
    """Iterates over a source in global batches, which a thread reads ahead.

    Every `for` starts at the position of the loader and runs to the end of the epoch (or of
    `num_epochs`). The next one begins the next epoch, in another order.

    Args:
      source: a tree of arrays (NumPy, memory-mapped) that share their leading dimension, or an
        object with `len(source)` and `source[i]` (a list of examples, a dataset of PyTorch or
        `grain.MapDataset`), whose examples are trees of the same shapes and dtypes. It must be the
        same on every process.
      batch_size: examples of the global batch, over all processes; a multiple of the devices.
      plan: the plan of `shard_train_state`; its mesh says which examples this process reads.
      seed: 0 or more; the order of an epoch is
        `np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
        .permutation(len(source))`, 8 bytes for each example.
      shuffle: False keeps the order of the source.
      num_epochs: epochs that one `for` gives; None for no end.
      drop_remainder: leave out the examples that do not fill a batch at the end of an epoch. With
        False the last batch is smaller, and must be a multiple of the devices too.
      prefetch: batches that are read and placed ahead; 0 for none, and no thread.
      transform: `transform(example)`, or `transform(example, rng)` with a `np.random.Generator` of
        its own for every example and epoch; returns the example to stack. It runs in the thread.

    Raises:
      GShardError: an argument is not valid; while iterating, if examples differ in form.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> step = gshard.make_train_step(loss_fn, plan)
      >>> for global_batch in gshard.DataLoader(batch, 8, plan, num_epochs=1):
      ...     state, metrics = step(state, global_batch)
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        plan: Plan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = 1,
        drop_remainder: bool = True,
        prefetch: int = 2,
        transform: Callable[..., Any] | None = None,
    ):
        check_plan(plan, "DataLoader(source, batch_size, plan)")
        if not local_positions(plan):
            raise GShardError(
                "this process has no device in the mesh of the plan: it has no rows to load."
            )
        size = check_integer("batch_size", batch_size, 1, " of rows of the global batch")
        seed = check_integer("seed", seed, 0)
        shuffle, drop = flag("shuffle", shuffle), flag("drop_remainder", drop_remainder)
        if num_epochs is not None:
            num_epochs = check_integer("num_epochs", num_epochs, 1, " (None: without end)")
        self._plan, self._num_epochs = plan, num_epochs
        self._prefetch = check_integer("prefetch", prefetch, 0, " of batches")
        self._source = Source(source, transform, seed)
        self._order = EpochOrder(self._source.length, size, seed, shuffle, drop)
        self._order.check(plan.group.devices)
        self._made_with = {
            "seed": seed,
            "length": self._source.length,
            "batch_size": size,
            "shuffle": int(shuffle),
            "drop_remainder": int(drop),
            "checksum": self._source.checksum,
        }
        self._epoch = self._position = 0
        self._walk = 0  # how often an iteration began, or a state was loaded

    def __len__(self) -> int:
        """Number of batches of one epoch."""
        return self._order.batches

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Returns the position and the settings of the loader as integers, same on every process.

        `position` counts the batches of `epoch` that were returned, not those read ahead; after the
        last batch it is 0, in the next epoch. `checksum` is that of the first and the last example
        of arrays or of a list.
        """
        epoch, position = self._next()
        return {"epoch": epoch, "position": position, **self._made_with}

    def _next(self) -> tuple[int, int]:
        """Returns epoch and position of the next batch."""
        over = self._position == len(self)
        return (self._epoch + 1, 0) if over else (self._epoch, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the position of another loader, on any number of processes.

        The batches from there on are bit-identical.

        Raises:
          GShardError: the state is of other data, or of a loader with other arguments.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            what = f": {differences(list(state), list(own))}" if isinstance(state, Mapping) else ""
            raise GShardError(
                f"load_state_dict was given {shown(state)}, which is not what "
                f"DataLoader.state_dict returns{what}."
            )
        given = {name: check_integer(f"state[{name!r}]", x, 0) for name, x in state.items()}
        for name, mine in self._made_with.items():
            if given[name] != mine:
                theirs, own_one = (
                    _describe_argument(name, given[name]),
                    _describe_argument(name, mine),
                )
                raise GShardError(
                    f"the state is of a loader with {theirs}, and this one has {own_one}: the same "
                    f"position is not the same place in the data. Make the loader with {theirs}, "
                    "or start over without the state."
                )
        if given["position"] > len(self):
            raise GShardError(
                f"the state's position is {given['position']}, and an epoch has {len(self)} "
                "batches. It is not of this loader."
            )
        self._epoch, self._position = given["epoch"], given["position"]
        self._walk += 1

    def __iter__(self) -> Iterator[Any]:
        """Iterates from the current position to the end of the epoch, or of `num_epochs`.

        Processes compare the arguments, data and positions of their loaders here.

        Raises:
          GShardError: the loaders differ, or a process did not join the comparison.
        """
        self._walk += 1
        self._epoch, self._position = self._next()  # after a `break` at the last batch
        if self._plan.mesh.is_multi_process:
            compare_loaders(self.state_dict(), self._source.words, self._plan)
        return self._iterate(self._walk)

    def _iterate(self, walk: int) -> Iterator[Any]:
        for at, batch in map_ahead(self._batches_from_here(), self._batch, self._prefetch):
            self._refuse_left_behind(walk)
            self._epoch, self._position = at[0], at[1] + 1
            yield batch
            self._refuse_left_behind(walk)
        self._refuse_left_behind(walk)
        self._epoch, self._position = self._epoch + 1, 0

    def _batches_from_here(self) -> Iterator[tuple[int, int]]:
        """Yields epoch and position of each batch of one `for`, from the current position."""
        epoch, position = self._epoch, self._position
        while True:
            for p in range(position, len(self)):
                yield epoch, p
            epoch, position = epoch + 1, 0
            # So a `for` that continues from a state ends where the interrupted one would have.
            if self._num_epochs is not None and epoch % self._num_epochs == 0:
                return

    def _batch(self, at: tuple[int, int]) -> Any:
        """Makes one global batch, of which this process reads its own examples."""
        epoch, position = at
        rows = local_indices(self._plan, self._order.rows(epoch, position), jax.process_index())
        try:
            # The loaders were compared when the `for` began, so nothing is compared here: that
            # would be a collective in a thread, in no order with those of the step.
            return put_batch(self._source.read(rows, epoch), self._plan, copy=False)
        except Exception as error:
            error.add_note(f"gshard.DataLoader was at batch {position} of epoch {epoch}.")
            raise

    def _refuse_left_behind(self, walk: int) -> None:
        if walk != self._walk:
            raise CallOrderError(
                "this iteration of the DataLoader is over: another one of the same loader began, "
                "or a state was loaded. A loader is at one place; make a second one to read twice."
            )


def global_batches(batches: Iterable[Any], plan: Plan) -> Iterator[Any]:
    """Turns batches of this process's examples into global batches, one by one.

    It is for sources with an order of their own: a `grain.DataLoader` or `IterDataset`, PyTorch's
    `DataLoader` with NumPy batches, a generator. Their state stays yours (`get_state`,
    `set_state`): nothing is read ahead.

    Args:
      batches: batches as `shard_batch` takes them; the same number on every process.
      plan: the plan of `shard_train_state`.

    Returns:
      An iterator over trees of global arrays.

    Raises:
      GShardError: an argument is not valid; while iterating, as in `shard_batch`.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> [x["x"].shape for x in gshard.global_batches([batch, batch], plan)]
      [(16, 64), (16, 64)]
    """
    check_plan(plan, "global_batches(batches, plan)")
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes, Mapping)):
        raise GShardError(
            f"global_batches(batches, plan): batches={shown(batches)} does not give batches one by "
            "one. Pass an iterable, such as a list or a generator of them; for one batch use "
            "gshard.shard_batch."
        )
    return (shard_batch(batch, plan) for batch in batches)


def _describe_argument(name: str, value: int) -> str:
    """Describes one argument of a loader, for messages."""
    if name == "length":
        return f"a source of {value} rows"
    if name == "checksum":
        return f"a first and a last row of checksum {value:#010x}"
    return f"{name}={bool(value) if name in ('shuffle', 'drop_remainder') else value}"


class EpochOrder:
    """The order of the examples: their indices for every batch of every epoch."""

    def __init__(self, length: int, batch_size: int, seed: int, shuffle: bool, drop: bool):
        self.length, self.batch_size, self.drop = length, batch_size, drop
        self._seed, self._shuffle = seed, shuffle
        self._kept: tuple[int, np.ndarray] | None = None

    @property
    def batches(self) -> int:
        """Number of batches of one epoch."""
        return self.length // self.batch_size if self.drop else -(-self.length // self.batch_size)

    def rows(self, epoch: int, position: int) -> np.ndarray:
        """Returns the indices of the examples of one global batch, int64, in order.

        The permutation of an epoch takes 8 bytes per example, and is kept until the next epoch. It
        is that of NumPy's generator, whose stream a new version of NumPy may change.
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
        """Checks that every batch size is a multiple of the devices that examples are sharded over.

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


def local_indices(plan: Plan, rows: np.ndarray, process: int) -> np.ndarray:
    """Returns those indices of a global batch that belong to devices of this process, in order."""
    each = rows.size // plan.group.devices
    places = rows.reshape(plan.group.devices, each)
    return places[sorted(positions_by_process(plan)[process])].reshape(-1)
