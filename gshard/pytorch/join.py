"""`Join`: training on uneven inputs, until the data of every device is used up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gshard._util.activity import doing
from gshard._util.errors import ArgumentTypeError, GShardError, UnevenInputsError, some, warn
from gshard._util.pytree import flatten
from gshard._util.validation import flag, shown
from gshard.data.batch import local_positions
from gshard.distributed.agree import spans_processes
from gshard.distributed.broadcast import sum_over_devices
from gshard.pytorch.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.wrapped_model import Wrapped, kept

_MANY = 1000  # batches that a device has waited for the others
_END = object()  # of an iterable


class Join:
    """A context in which a device that has run out of data takes part with weight 0.

    Every device runs every step, as collectives require. A device without data runs on examples of
    another device of its process or, if the process has no data left, on the last ones of its first
    input, with zeros for NaN and infinities. BatchNorm statistics include these examples.

    Example:
      >>> from flax import nnx
      >>> ddp = gshard.pytorch.DistributedDataParallel(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> opt = gshard.pytorch.ZeroRedundancyOptimizer(ddp, optax.adam, lr=1e-3)
      >>> mean_square = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
      >>> with gshard.pytorch.Join([ddp, opt]) as join:
      ...     for batch in join([batch, batch]):
      ...         loss = ddp.backward(mean_square, batch)
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
          joinables: `DistributedDataParallel`s and `ZeroRedundancyOptimizer`s on the same
            devices.
          enable: False if inputs are known to be even: processes then do not communicate before
            each batch.
          throw_on_early_termination: raise on all processes as soon as one runs out of data.
          divide_by_initial_world_size: average gradients over all devices, as PyTorch does by
            default. False: over the devices that have data, which matches single-device training
            on the examples of all of them. Use False with a loss that returns `gshard.Weighted`:
            the default adds the weights of examples that devices without data run on.

        Raises:
          ArgumentTypeError: a joinable is neither of the two.
          GShardError: the list is empty, or the joinables are on different devices.
        """
        flag("enable", enable)
        flag("throw_on_early_termination", throw_on_early_termination)
        flag("divide_by_initial_world_size", divide_by_initial_world_size)
        if not isinstance(joinables, Sequence) or not joinables:
            raise GShardError(
                f"Join({shown(joinables)}): pass a list of at least one "
                "DistributedDataParallel or ZeroRedundancyOptimizer."
            )
        for x in joinables:
            if not isinstance(x, (Wrapped, ZeroRedundancyOptimizer)):
                raise ArgumentTypeError(
                    f"Join: {shown(x)} is neither a DistributedDataParallel nor a "
                    "ZeroRedundancyOptimizer."
                )
        models = [x if isinstance(x, Wrapped) else x.ddp for x in joinables]
        if None in models:
            raise GShardError(
                "Join: this ZeroRedundancyOptimizer has no DistributedDataParallel, whose backward "
                "gives devices without data no weight. For your own gradients, return "
                "gshard.Weighted(sum, weight) from the loss instead."
            )
        plans: list[Any] = [x.plan for x in joinables]
        if any(list(p.mesh.devices.flat) != list(plans[0].mesh.devices.flat) for p in plans):
            raise GShardError(
                "Join: the joinables are on different devices. Use one group for all."
            )
        self._plan = plans[0]
        self._models: list[Accumulation] = [kept(x) for x in models]
        self._enable, self._throw = enable, throw_on_early_termination
        self._initial = divide_by_initial_world_size
        self._is_called = False

    def __enter__(self) -> Join:
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        self._set_weights(None)
        if self._enable and error is None and not self._is_called:
            warn(
                "Join: the loop was not over join(inputs), so that it joined nothing: where inputs "
                "are uneven, processes would wait for each other forever. Write "
                "`with Join([...]) as join:` and `for batch in join(inputs):`."
            )

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
        self._is_called = True
        devices = local_positions(self._plan)
        if len(inputs) not in (1, devices):
            raise GShardError(
                f"join: {len(inputs)} inputs, but this process has {devices} devices. Pass one "
                "iterable for all of them, or one for each."
            )
        sources = [_Source(x, f"inputs[{i}]") for i, x in enumerate(inputs)]
        try:
            while self._some_left(sources):
                known = [s for s in sources if s.batch is not None]
                if not known:
                    raise GShardError(
                        "join: this process has no batch at all, so the shapes of the others' "
                        "batches are unknown here. Give each process at least one batch."
                    )
                # Examples that some device trains on: old ones may no longer have a finite loss.
                spare = max(known, key=lambda s: s.left).batch
                batches = [s.batch if s.left else spare for s in sources]
                if len({str(_shapes(x)) for x in batches}) > 1:
                    raise GShardError(
                        f"join: batches have different shapes: {some(map(_shapes, batches))}. All "
                        "inputs must have the same number of examples in each batch."
                    )
                left = np.array([s.left for s in sources], np.float32)
                self._set_weights(left.repeat(devices // len(inputs)))
                yield jax.tree.map(_concatenated, *batches) if len(batches) > 1 else batches[0]
        finally:
            self._set_weights(None)

    def _some_left(self, sources: list[_Source]) -> bool:
        """Advances all sources; returns whether any process has data left."""
        for source in sources:
            source.advance()
        left = [source.left for source in sources]
        every = left
        if self._enable and spans_processes(self._plan):
            one = {d.process_index: d for d in self._plan.mesh.devices.flat}
            mesh = Mesh(np.array([one[rank] for rank in sorted(one)]), ("process",))
            with doing("join, for the next batch", waits=True, mesh=mesh):
                found = sum_over_devices(np.array([any(left), all(left)], np.uint32), mesh)
            every = [found.any(), (found == len(one)).all()]
        if any(every) and not all(every) and (self._throw or not self._enable):
            who = "another process" if all(left) else f"process {jax.process_index()}"
            asked = "throw_on_early_termination=True" if self._throw else "enable=False"
            raise UnevenInputsError(
                f"join: {who} has no data left, but others have. Give every input the "
                f"same number of batches, or leave out {asked}."
            )
        if any(source.idle == _MANY for source in sources):
            warn(
                f"join: a device has waited for {_MANY} batches of others. Distribute the data "
                "evenly."
            )
        return any(every)

    def _set_weights(self, weights: np.ndarray | None) -> None:
        for model in self._models:
            model.joined = None if weights is None else (weights, self._initial)


class _Source:
    """One input: its current batch, and whether that batch is new."""

    def __init__(self, batches: Iterable[Any], name: str):
        if not isinstance(batches, Iterable):
            raise ArgumentTypeError(f"join: {name}={shown(batches)} is not an iterable of batches.")
        self._batches, self._name = iter(batches), name
        self._is_iterator = self._batches is batches
        self.batch: Any = None
        self.left, self.idle = True, 0

    def advance(self) -> None:
        """Takes the next batch, if there is one."""
        batch = next(self._batches, _END) if self.left else _END
        self.left = batch is not _END
        if not self.left:
            if self.batch is None and self._is_iterator and not self.idle:
                warn(
                    f"join: {self._name} has no batch. It is an iterator, such as a generator, "
                    "which can be read only once: if an earlier loop has read it, make a new one "
                    "for each epoch."
                )
            self.idle += 1
            return
        if batch is None:
            raise GShardError(
                f"join: a batch of {self._name} is None, and no step can run on it. Leave it out "
                "of the iterable."
            )
        if self.batch is not None and _shapes(batch) != _shapes(self.batch):
            raise GShardError(
                f"join: a batch of {self._name} has shapes {_shapes(batch)}, but the previous one "
                f"has {_shapes(self.batch)}. Leave out a smaller last batch, or pad it and weight "
                "its examples: a loss that returns gshard.Weighted(sum, weight)."
            )
        self.batch = batch


def _shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(x) for path, x in zip(*flatten(batch)[:2], strict=True)}


def _concatenated(*arrays: Any) -> Any:
    if np.ndim(arrays[0]):
        return np.concatenate(arrays)
    if any(x is not arrays[0] and x != arrays[0] for x in arrays):
        raise GShardError(
            f"join: a scalar of the batches differs between the inputs: {some(map(str, arrays))}. "
            "Give each device an array with one entry per example."
        )
    return arrays[0]
