"""`DataLoader`: makes global batches of random-access data, in a reproducible order.

The global batch is the same for any number of processes: each reads its own examples of it. The
position of a loader is two numbers, so that training can continue where it stopped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gshard._util.activity import spent_on
from gshard._util.arguments import named_arguments
from gshard._util.errors import CallOrderError, GShardError, warn
from gshard._util.pytree import differences
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, flag, shown
from gshard.data.batch import (
    check_has_examples,
    check_leaves,
    check_plan,
    local_positions,
    positions_by_process,
    put_batch,
    shard_batch,
)
from gshard.data.batch_number import MASK, may_have_padding, set_number
from gshard.data.consistency import compare_loaders
from gshard.data.prefetch import map_ahead
from gshard.data.source import Source
from gshard.distributed.machines import advice
from gshard.distributed.traced_losses import compare_losses
from gshard.sharding.plan import Plan

_WHOLE = (
    "Leave it out: every process passes the full dataset, and the loader chooses which examples "
    "each of them reads."
)
_INSTEAD = {  # of other loaders' arguments
    "plan": "Pass the plan of shard_train_state, or the .plan of a wrapped model or optimizer.",
    "batch_size": "It counts the examples of the global batch, over all processes.",
    "dataset": "It is source= here.",
    "drop_last": "It is drop_remainder= here, and on by default.",
    "collate_fn": "It is transform= here, a function of one example.",
    "num_workers": "Leave it out: a thread reads prefetch= batches ahead.",
    "prefetch_factor": "It is prefetch= here.",
    "generator": "It is seed= here.",
    "epochs": "It is num_epochs= here.",
    **dict.fromkeys(
        ("pin_memory", "persistent_workers", "places", "use_shared_memory"),
        "Leave it out: batches are placed on the devices ahead of time.",
    ),
    **dict.fromkeys(("sampler", "batch_sampler", "rank", "num_replicas"), _WHOLE),
}
_LIST_OF_ARRAYS = (
    " In a list, each array is one example. Pass arrays with one entry per example as a tuple or a "
    "dictionary."
)
_ENDLESS = sys.maxsize // 2  # examples, as of `grain.MapDataset.repeat()`


class DataLoader:
    """Iterates over a source in global batches, which a thread reads ahead.

    Every `for` starts at the position of the loader and runs to the end of the epoch (or of
    `num_epochs`). The next one begins the next epoch, in another order.

    Args:
      source: a tree of arrays (NumPy, memory-mapped) that share their leading dimension, or an
        object with `len(source)` and `source[i]` (a list of examples, a dataset of PyTorch or
        `grain.MapDataset`), whose examples are trees of the same shapes and dtypes. It must be the
        same on every process.
      batch_size: examples of the global batch, over all processes; a multiple of the devices,
        of which those along a sequence axis count once.
      plan: the plan of `shard_train_state`; its mesh says which examples this process reads.
      seed: 0 or more; the order of an epoch is
        `np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
        .permutation(len(source))`, which takes 8 bytes of memory per example.
      shuffle: False keeps the order of the source.
      num_epochs: epochs until a `for` loop ends; None for no end. A loop that resumes from a saved
        state ends where the interrupted loop would have ended.
      drop_remainder: leave out the examples that do not fill a batch at the end of an epoch. With
        False the last batch is smaller, and must be a multiple of the devices too. The default,
        None, drops them, and warns if `shuffle` is False, because the same examples are then missed
        in every epoch.
      pad_last: fill the last batch of an epoch with examples that it has already, instead of
        dropping it. Every batch, a dictionary, then has a boolean array `"mask"`, one entry for
        each example: False for those that fill it. Some devices may then get nothing but those:
        with `loss_semantics="per_device"` return `gshard.Weighted((x * mask).sum(), mask.sum())`.
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

    @named_arguments(_INSTEAD)
    def __init__(
        self,
        source: Any,
        batch_size: int,
        plan: Plan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = 1,
        drop_remainder: bool | None = None,
        pad_last: bool = False,
        prefetch: int = 2,
        transform: Callable[..., Any] | None = None,
    ):
        check_plan(plan, "DataLoader(source, batch_size, plan)")
        check_has_examples(local_positions(plan))
        size = check_integer("batch_size", batch_size, 1, " of examples of the global batch")
        seed = check_integer("seed", seed, 0)
        shuffle, self._pads = flag("shuffle", shuffle), flag("pad_last", pad_last)
        is_asked = drop_remainder is not None
        drop = (not is_asked or flag("drop_remainder", drop_remainder)) and not self._pads
        if self._pads and is_asked and drop_remainder:
            raise GShardError(
                "pad_last=True fills the last batch, and drop_remainder=True drops it: they "
                "contradict each other. Leave one of them out."
            )
        if num_epochs is not None:
            num_epochs = check_integer("num_epochs", num_epochs, 1, " (None: without end)")
        self._plan, self._num_epochs = plan, num_epochs
        self._prefetch = check_integer("prefetch", prefetch, 0, " of batches")
        self._source, self._reading = Source(source, transform, seed), threading.Lock()
        self._settings = {
            "seed": seed,
            "length": self._source.length,
            "batch_size": size,
            "shuffle": int(shuffle),
            "drop_remainder": int(drop),
            "checksum": self._source.checksum,
        }
        is_list = isinstance(source, list) and isinstance(source[0], np.ndarray | jax.Array)
        hint = _LIST_OF_ARRAYS if is_list else ""
        _check_sizes(self._source.length, size, drop, plan.group.batch_shards, self._pads, hint)
        if shuffle and self._source.length >= _ENDLESS:
            raise GShardError(
                "DataLoader: this source has no end, so its examples cannot be shuffled as a "
                "whole. Shuffle the data set itself, such as dataset.shuffle(seed=0).repeat(), "
                "and pass shuffle=False."
            )
        if drop and not shuffle and not is_asked and self._source.length < _ENDLESS:
            self._warn_of_unread(size)
        self._has_padding = self._pads and self._source.length % size > 0
        if self._pads:
            self._source.check_takes_mask()
        self._order: tuple[int, np.ndarray] | None = None  # an epoch, and its permutation
        self._epoch = self._position = 0
        self._iteration = 0  # how often an iteration began, or a state was loaded
        self._is_restored = False  # and no iteration began since

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_reading"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reading=threading.Lock())

    def _warn_of_unread(self, size: int) -> None:
        left = self._source.length % size
        if not left:
            return
        if left % self._plan.group.batch_shards == 0:
            how = "drop_remainder=False reads them too, in a smaller last batch"
        elif self._source.takes_mask:
            how = "pad_last=True reads them too, in a last batch that is filled up and has a mask"
        else:
            how = "Make each example a dictionary (transform=) and pass pad_last=True to read them"
        warn(
            f"the last {left} of {self._source.length} examples are never read: they fill no batch "
            f"of {size}, and shuffle=False. {how}; pass drop_remainder=True if that is intended."
        )

    def __len__(self) -> int:
        """Number of batches of one epoch."""
        length, size = self._settings["length"], self._settings["batch_size"]
        return length // size if self._settings["drop_remainder"] else -(-length // size)

    def __repr__(self) -> str:
        given = self._settings
        what = f"{given['length']} examples in batches of {given['batch_size']}"
        return f"DataLoader({what}, epoch={self._epoch}, position={self._position})"

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    def micro_batches(self, examples_per_device: int) -> int:
        """Returns the smallest number of micro-batches that `examples_per_device` allows.

        It divides a device's examples of a batch, and a device takes at most that many examples at
        a time. On fewer devices there are more micro-batches, so a step needs no more memory and
        computes the same.

        Args:
          examples_per_device: the most that a device may take at a time.

        Returns:
          The number for `make_train_step(micro_batches=)`.

        Example:
          >>> mesh = gshard.make_mesh()
          >>> _, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
          >>> gshard.DataLoader(batch, 16, plan).micro_batches(examples_per_device=1)
          2
        """
        most = check_integer("examples_per_device", examples_per_device, 1)
        each = self._settings["batch_size"] // self._plan.group.batch_shards
        return next(k for k in range(1, each + 1) if each % k == 0 and each // k <= most)

    def state_dict(self) -> dict[str, int]:
        """Returns the position and the settings of the loader as integers, same on every process.

        `position` counts the batches of `epoch` that were returned, not those read ahead; after the
        last batch it is 0, in the next epoch. `checksum` is that of the first and the last example
        of arrays or of a list.
        """
        epoch, position = self._next()
        return {"epoch": epoch, "position": position, **self._settings}

    def _next(self) -> tuple[int, int]:
        """Returns epoch and position of the next batch."""
        over = self._position == len(self)
        return (self._epoch + 1, 0) if over else (self._epoch, self._position)

    @short_traceback
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
        for name, value in self._settings.items():
            if given[name] != value and name == "checksum":
                raise GShardError(
                    "the data are not those of the saved run: their first or last example differs. "
                    "Give the loader the same data in the same order, or start over without the "
                    "state."
                )
            if given[name] != value:
                theirs = _describe_argument(name, given[name])
                raise GShardError(
                    f"the state is of a loader with {theirs}, and this one has "
                    f"{_describe_argument(name, value)}: the same position means other examples. "
                    f"Make the loader with {theirs}, or start over without the state."
                )
        if given["position"] > len(self):
            raise GShardError(
                f"the state's position is {given['position']}, and an epoch has {len(self)} "
                "batches. It is not of this loader."
            )
        self._epoch, self._position = given["epoch"], given["position"]
        self._iteration += 1
        self._is_restored = True

    def __iter__(self) -> Iterator[Any]:
        """Iterates from the current position to the end of the epoch, or of `num_epochs`.

        Processes compare the arguments, data and positions of their loaders here.

        Raises:
          GShardError: the loaders differ, or a process did not join the comparison.
        """
        self._iteration += 1
        self._epoch, self._position = self._next()  # after a `break` at the last batch
        if self._is_restored:
            self._warn_of_more_epochs()
            self._is_restored = False
        if self._plan.mesh.is_multi_process:
            more = {"pad_last": self._pads, "num_epochs": self._num_epochs}
            given = {**self.state_dict(), **more}
            compare_loaders(given, self._source.form, self._source.sample, self._plan)
            compare_losses(self._plan)
        return self._iterate(self._iteration)

    def _warn_of_more_epochs(self) -> None:
        epoch, count = self._epoch, self._num_epochs or 1
        if count > 1 and epoch and not epoch % count and not self._position:
            warn(
                f"the state was saved after {epoch} epochs, where a `for` with num_epochs={count} "
                f"ends, so this `for` loop starts {count} more. If the training was complete, "
                f"start the loop only `if loader.epoch < {epoch}`."
            )

    @short_traceback
    def _iterate(self, iteration: int) -> Iterator[Any]:
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

        def work(at: tuple[int, int], go_on: Callable[[], None]) -> Any:
            with jax.enable_x64(wide):  # which another thread does not take over
                return self._batch(at, go_on)

        ahead = map_ahead(self._batches_from_here(), work, self._prefetch)
        for at, batch in spent_on("data", ahead):
            self._check_current(iteration)
            self._epoch, self._position = at[0], at[1] + 1
            mask = batch[MASK] if self._has_padding else None
            set_number(batch, at[0] * len(self) + at[1], mask)
            yield batch
            self._check_current(iteration)
        self._check_current(iteration)
        self._epoch, self._position = self._epoch + 1, 0

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise CallOrderError(
                "this iteration of the DataLoader is over: another one of the same loader began, "
                "or a state was loaded. A loader has one position; make a second one to read twice."
            )

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

    def _batch(self, at: tuple[int, int], go_on: Callable[[], None]) -> Any:
        """Makes one global batch, of which this process reads its own examples."""
        # After a `break` the thread of that `for` may still be reading.
        with self._reading:
            return self._read(at, go_on)

    def _read(self, at: tuple[int, int], go_on: Callable[[], None]) -> Any:
        epoch, position = at
        indices = self._indices(epoch, position)
        size = self._settings["batch_size"] if self._pads else indices.size
        devices = self._plan.group.batch_shards
        of_devices = np.resize(indices, size).reshape(devices, -1)  # repeated where it pads
        given = (np.arange(size) < indices.size).reshape(devices, -1)
        mine = sorted(positions_by_process(self._plan)[jax.process_index()])
        try:
            # The loaders were compared when the `for` began, so nothing is compared here: that
            # would be a collective in a thread, in no order with those of the step.
            batch = self._source.read(of_devices[mine].reshape(-1), epoch, go_on)
            if self._pads:
                batch[MASK] = given[mine].reshape(-1)
            check_leaves(batch)
            return put_batch(batch, self._plan, copy=False)
        except Exception as error:
            error.add_note(f"gshard.DataLoader was at batch {position} of epoch {epoch}.")
            raise

    def _indices(self, epoch: int, position: int) -> np.ndarray:
        """Returns the indices of the examples of one global batch, int64, in order.

        The permutation of an epoch takes 8 bytes per example, and is kept until the next epoch. It
        is that of NumPy's generator, whose stream a new version of NumPy may change.
        """
        length, size = self._settings["length"], self._settings["batch_size"]
        start = position * size
        stop = min(start + size, length)
        if not self._settings["shuffle"]:
            return np.arange(start, stop)
        if self._order is None or self._order[0] != epoch:
            entropy = np.random.SeedSequence(self._settings["seed"], spawn_key=(epoch,))
            self._order = (epoch, np.random.default_rng(entropy).permutation(length))
        return self._order[1][start:stop]


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
    is_one = isinstance(batches, (str, bytes, Mapping))
    is_one |= hasattr(batches, "iloc") or hasattr(batches, "__array__")  # a table, or an array
    if isinstance(batches, tuple) and batches:  # of inputs and targets
        is_one = all(hasattr(x, "shape") for x in batches)
    if is_one or not isinstance(batches, Iterable):
        raise GShardError(
            f"global_batches(batches, plan): batches={shown(batches)} does not give batches one by "
            "one. Pass a list or a generator of them (a tuple of arrays is one batch); for one "
            "batch use gshard.shard_batch."
        )
    return _numbered(batches, plan)


def _numbered(batches: Iterable[Any], plan: Plan) -> Iterator[Any]:
    placing = (shard_batch(batch, plan) for batch in batches)
    for number, placed in enumerate(spent_on("data", placing)):
        if not may_have_padding(placed):  # else it is of a `DataLoader`, and keeps its mask
            set_number(placed, number)
        yield placed


def _describe_argument(name: str, value: int) -> str:
    if name == "length":
        return f"a source of {value} examples"
    return f"{name}={bool(value) if name in ('shuffle', 'drop_remainder') else value}"


def _check_sizes(length: int, size: int, drop: bool, devices: int, pads: bool, hint: str) -> None:
    """Checks that every batch has a multiple of the devices that examples are sharded over."""
    if size % devices:
        near = max(devices, size // devices * devices)
        raise GShardError(
            f"batch_size={size}, the examples of the global batch, is not a multiple of the "
            f"{devices} devices that they are sharded over. Use {near} or {near + devices}."
            f"{advice(size, devices)}"
        )
    if drop and length < size:
        raise GShardError(
            f"the source has {length} examples, fewer than batch_size={size}, and an incomplete "
            "batch is dropped, so there is no batch. Use a smaller batch_size, or pad_last=True."
            f"{hint}"
        )
    if not drop and not pads and length % devices:
        near = length // devices * devices
        fewer = f"{near} or " if near else ""
        raise GShardError(
            f"drop_remainder=False: the last batch has {length % size} examples, which is not a "
            f"multiple of the {devices} devices. Give {fewer}{near + devices} examples instead of "
            f"{length}, fill the batch and have its padding marked (pad_last=True), or drop the "
            "remainder."
        )
