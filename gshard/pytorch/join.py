"""`Join`: training on uneven inputs, until the data of every device is used up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gshard._util.errors import ArgumentTypeError, GShardError, UnevenInputsError, some, warn
from gshard._util.pytree import flatten
from gshard._util.validation import flag, shown
from gshard.data.batch import local_positions
from gshard.pytorch.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.wrapped_model import Wrapped, kept

_MANY = 1000  # batches that a device has waited for the others


class Join:
    """A context in which a device that has run out of data takes part with weight 0.

    Every device runs every step, as collectives require. A device without data runs on examples of
    another device, or on its own last ones: BatchNorm statistics include these examples.

    Example:
      >>> from flax import nnx
      >>> dp = gshard.pytorch.DataParallel(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> opt = gshard.pytorch.ZeroRedundancyOptimizer(dp, optax.adam, lr=1e-3)
      >>> mean_square = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
      >>> with gshard.pytorch.Join([dp, opt]) as join:
      ...     for batch in join([batch, batch]):
      ...         loss = dp.backward(mean_square, batch)
      ...         _ = opt.step()
      ...         opt.zero_grad()
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        divide_by_initial_world_size: bool = True,
    ):
        """Joins models and optimizers.

        Args:
          joinables: `DataParallel`s and `ZeroRedundancyOptimizer`s on the same devices.
          enable: False if inputs are known to be even: processes then do not communicate before
            each batch.
          throw_on_early_termination: raise on all processes as soon as one runs out of data.
          divide_by_initial_world_size: average gradients over all devices, as PyTorch does by
            default. False: over the devices that have data, which matches single-device training
            on the examples of all of them.

        Raises:
          ArgumentTypeError: a joinable is neither of the two.
          GShardError: the list is empty, or the joinables are on different devices.
        """
        flag("enable", enable)
        flag("throw_on_early_termination", throw_on_early_termination)
        flag("divide_by_initial_world_size", divide_by_initial_world_size)
        if not isinstance(joinables, Sequence) or not joinables:
            raise GShardError(
                f"Join({shown(joinables)}): pass a list of at least one DataParallel or "
                "ZeroRedundancyOptimizer."
            )
        strange = [x for x in joinables if not isinstance(x, (Wrapped, ZeroRedundancyOptimizer))]
        if strange:
            raise ArgumentTypeError(
                f"Join: {shown(strange[0])} is neither a DataParallel nor a "
                "ZeroRedundancyOptimizer."
            )
        models = [x if isinstance(x, Wrapped) else x.ddp for x in joinables]
        if None in models:
            raise GShardError(
                "Join: this ZeroRedundancyOptimizer has no DataParallel, whose backward weighs "
                "devices without data. With gradients of your own return "
                "gshard.Weighted(sum, weight) from the loss."
            )
        plans = [x.plan for x in joinables]
        if any(list(p.mesh.devices.flat) != list(plans[0].mesh.devices.flat) for p in plans):
            raise GShardError("Join: these lie on different devices. Give all the same group.")
        self._plan = plans[0]
        self._models: list[Accumulation] = [kept(x) for x in models]
        self._enable, self._throw = enable, throw_on_early_termination
        self._initial = divide_by_initial_world_size

    def __enter__(self) -> Join:
        return self

    def __exit__(self, *_: Any) -> None:
        self._weigh(None)

    def __call__(self, *inputs: Iterable[Any]) -> Iterator[Any]:
        """Yields batches of this process until all inputs of all processes are used up.

        Args:
          *inputs: one iterable of batches, whose examples are sharded over this process's devices;
            or one iterable per device, in the order of examples. All batches of one iterable have
            the same shapes.

        Raises:
          UnevenInputsError: a process runs out of data before others, and
            `throw_on_early_termination` is True or `enable` is False.
          GShardError: the number of inputs is wrong, or a batch has another shape.
        """
        places = local_positions(self._plan)
        if len(inputs) not in (1, places):
            raise GShardError(
                f"join: {len(inputs)} inputs, and this process has {places} devices. Pass one "
                "iterable for all of them, or one for each."
            )
        share = places // len(inputs)
        sources = [_Source(x, f"inputs[{i}]") for i, x in enumerate(inputs)]
        try:
            while self._some_left(sources):
                known = [s.last for s in sources if s.last is not None]
                # Examples that some device trains on: old ones may have no finite gradient by now.
                like = next((s.last for s in sources if s.left), known[0] if known else None)
                if like is None:
                    raise GShardError(
                        "join: this process has no batch at all, and cannot know what others have. "
                        "Give each process at least one."
                    )
                rows = [s.last if s.left else like for s in sources]
                if len({str(_shapes(x)) for x in rows}) > 1:
                    raise GShardError(
                        f"join: batches have different shapes: {some(map(_shapes, rows))}. Every "
                        "input has the same number of rows in each batch."
                    )
                has = np.array([s.left for s in sources for _ in range(share)], np.float32)
                self._weigh(has)
                yield jax.tree.map(_joined, *rows) if len(rows) > 1 else rows[0]
        finally:
            self._weigh(None)

    def _some_left(self, sources: list[_Source]) -> bool:
        for source in sources:
            source.advance()
        left = [source.left for source in sources]
        every = left
        if self._enable and jax.process_count() > 1:
            found = multihost_utils.process_allgather(np.array([any(left), all(left)]))
            every = [bool(x) for x in np.asarray(found).ravel()]
        early = any(every) and not all(every)
        if early and (self._throw or not self._enable):
            rank, mine = jax.process_index(), not all(left)
            why = f"process {rank} has no data left" if mine else "another process has no data left"
            raise UnevenInputsError(
                f"join: {why}, and others have. "
                + ("throw_on_early_termination=True." if self._throw else "Leave out enable=False.")
            )
        if any(source.idle == _MANY for source in sources):
            warn(f"join: a device has waited for {_MANY} batches of others. Share data evenly.")
        return any(every)

    def _weigh(self, has: np.ndarray | None) -> None:
        for model in self._models:
            model.joined = None if has is None else (has, self._initial)


class _Source:
    """One input: its current batch, and whether that batch is new."""

    def __init__(self, batches: Iterable[Any], name: str):
        if not isinstance(batches, Iterable):
            raise ArgumentTypeError(f"join: {name}={shown(batches)} is not an iterable of batches.")
        self._batches, self._name = iter(batches), name
        self.last: Any = None
        self.left, self.idle = True, 0

    def advance(self) -> None:
        """Takes the next batch, if there is one."""
        try:
            batch = next(self._batches) if self.left else None
        except StopIteration:
            batch = None
        self.left = batch is not None
        self.idle += not self.left
        if batch is None:
            return
        if self.last is not None and _shapes(batch) != _shapes(self.last):
            raise GShardError(
                f"join: a batch of {self._name} has shapes {_shapes(batch)}, and the one before "
                f"{_shapes(self.last)}. Leave out a smaller last batch, or fill it up and weigh "
                "its rows: a loss that returns gshard.Weighted(sum, weight)."
            )
        self.last = batch


def _shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(x) for path, x in zip(*flatten(batch)[:2], strict=True)}


def _joined(*rows: Any) -> Any:
    return np.concatenate(rows) if np.ndim(rows[0]) else rows[0]
