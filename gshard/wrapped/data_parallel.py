"""`DataParallel`: parameters and optimizer state are replicated, gradients are all-reduced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gshard._util.arguments import named_arguments
from gshard._util.errors import GShardError, some
from gshard._util.validation import check_integer, flag, shown
from gshard.train.shard_train_state import shard_train_state
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.arguments import as_module, first_process, mesh_of
from gshard.wrapped.wrapped_model import Wrapped, keepers, wrapped

_MB = 2**20
_INSTEAD = {  # of PyTorch's arguments
    "module": "It is layers= here.",
    "device_ids": "Leave it out: group= names the devices, by default all.",
    "output_device": "Leave it out: outputs are sharded over the devices.",
    "process_group": "It is group= here.",
    "bucket_cap_mb": "It is comm_buffer_size= here.",
}


class DataParallel(Wrapped):
    """A model whose `backward` averages gradients over all devices.

    An instance is also an instance of the model's own class. `optimizer.update(dp, dp.grads)`
    works for any `nnx.Optimizer(dp, tx, wrt=nnx.Param)`.

    Example:
      >>> from flax import nnx
      >>> dp = gshard.paddle.DataParallel(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> optimizer = nnx.Optimizer(dp, tx, wrt=nnx.Param)
      >>> loss = dp.backward(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch)
      >>> _ = optimizer.update(dp, dp.grads)
      >>> dp.clear_gradients()
    """

    __slots__ = ()

    @named_arguments(_INSTEAD)
    def __new__(
        cls,
        layers: Any = None,
        strategy: Any = None,
        comm_buffer_size: int = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any = None,
    ) -> Any:
        """Wraps a copy of a model; the model itself is not changed.

        Args:
          layers: an NNX module, or `(linen_module, variables)`.
          strategy: ignored, as in Paddle.
          comm_buffer_size: size of a gradient bucket in MB (2^20 bytes); 0 turns buckets off.
          last_comm_buffer_size: size in MB of the first and of the last bucket to be reduced.
          find_unused_parameters: warn of the parameters that the loss does not depend on. Their
            gradient is zero either way, and weight decay still changes them.
          group: devices from `gshard.distributed.new_group`, or a mesh. Default: all devices.

        Returns:
          The wrapped model.

        Raises:
          GShardError: the model has no parameters, or a size is out of range.
        """
        if cls is not DataParallel:
            return copied(cls)
        del strategy
        size = check_integer("comm_buffer_size", comm_buffer_size, 0, " of MB (0: no buckets)")
        last = last_comm_buffer_size
        if isinstance(last, bool) or not isinstance(last, Real) or not 0 < last < math.inf:
            raise GShardError(
                f"last_comm_buffer_size={shown(last)} must be a positive number of MB."
            )
        return data_parallel(cls, layers, size, float(last), find_unused_parameters, group)

    def __init__(self, *_: Any, **__: Any):
        """Does nothing: `__new__` has made the model."""

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss unchanged: `backward` averages the gradients."""
        return loss

    def apply_collective_grads(self) -> None:
        """Does nothing: `backward` has reduced the gradients."""


def copied(kind: type) -> Any:
    """Returns an empty object for NNX, which copies a wrapped model; refuses a user's subclass."""
    if "_gshard_forward" not in vars(kind):
        raise GShardError(
            f"{kind.__name__} derives from {kind.__mro__[1].__name__}, which wraps a model and is "
            "an instance of the model's class. Subclass the model, and wrap it."
        )
    return object.__new__(kind)


def data_parallel(
    kind: type[DataParallel],
    model: Any,
    bucket_mb: int,
    end_bucket_mb: float,
    find_unused_parameters: bool,
    group: Any,
    argument: str = "group",
) -> Any:
    """Wraps a copy of a model as an instance of `kind`; `group` is that of the given argument."""
    flag("find_unused_parameters", find_unused_parameters)
    module = as_module(model, kind.__name__, kind)
    arrays = jax.tree.leaves(nnx.state(module, nnx.Param))
    if not arrays:
        raise GShardError(
            f"{kind.__name__}: this model has no nnx.Param to train, and needs no {kind.__name__}."
        )
    mesh, replica_axes = mesh_of(group, argument=argument)
    pair = (module, nnx.Optimizer(module, optax.identity(), wrt=nnx.Param))
    (copy, _), plan = shard_train_state(
        pair, mesh, "dp", replica_axes=replica_axes, broadcast_from=first_process(mesh)
    )
    width = max(jnp.result_type(x).itemsize for x in arrays)
    keep = Accumulation(
        plan,
        bucket_size=bucket_mb * _MB // width,
        end_bucket_size=max(1, int(end_bucket_mb * _MB) // width),
        find_unused=find_unused_parameters,
    )
    return wrapped(copy, kind, keep)


def fused_allreduce_gradients(parameters: Iterable[Any], hcg: Any = None) -> None:
    """Reduces the local gradients that `no_sync` has accumulated, into `model.grads`.

    Args:
      parameters: `model.parameters()` of one or several wrapped models. All gradients of a model
        are reduced, even if only some of its parameters are given.
      hcg: must be None. Gradients are averaged over the devices that the model was wrapped for.

    Raises:
      GShardError: these are not parameters of a wrapped model, or `hcg` is not None.

    Example:
      >>> from flax import nnx
      >>> dp = gshard.paddle.DataParallel(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> with dp.no_sync():
      ...     _ = dp.backward(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch)
      >>> gshard.paddle.fused_allreduce_gradients(dp.parameters())
      >>> dp.grads["kernel"].shape
      (64, 32)
    """
    if hcg is not None:
        raise GShardError(
            f"fused_allreduce_gradients: hcg={shown(hcg)}. Gradients are reduced over the devices "
            "that the model was wrapped for; pass None."
        )
    if isinstance(parameters, (str, Mapping)) or not isinstance(parameters, Iterable):
        raise GShardError(
            f"fused_allreduce_gradients: {shown(parameters)} is not an iterable of "
            "parameters. Pass model.parameters()."
        )
    variables = list(parameters)
    owners = keepers(variables)
    strange = [shown(x) for x, keep in zip(variables, owners, strict=True) if keep is None]
    if strange or not variables:
        raise GShardError(
            f"{some(strange) or 'an empty list'}: these are not the parameters of a wrapped model. "
            "Pass model.parameters()."
        )
    for keep in filter(None, owners):
        keep.reduce()
