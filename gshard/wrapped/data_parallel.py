"""`DataParallel`: nothing is divided, gradients are all-reduced; and its manual reduction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import jax
import optax
from flax import nnx

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, flag, shown
from gshard.train.shard_train_state import shard_train_state
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.groups import mesh_of
from gshard.wrapped.linen_bridge import as_module, refuse_wrapped
from gshard.wrapped.wrapped_model import Wrapped, owners, wrapped

_MB = 2**20


class DataParallel(Wrapped):
    """A model whose `backward` averages gradients over all devices.

    An instance is one of the model's own class too. `optimizer.update(dp, dp.grads)` steps any
    `nnx.Optimizer(dp, tx, wrt=nnx.Param)`.
    """

    __slots__ = ()

    def __new__(
        cls,
        layers: Any = None,
        strategy: Any = None,
        comm_buffer_size: int = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any = None,
    ) -> Any:
        """A wrapped copy of a model.

        Args:
          layers: an NNX module, or `(linen_module, variables)`.
          strategy: not used, as in Paddle.
          comm_buffer_size: MB (2^20 bytes) of gradients that are reduced together.
          last_comm_buffer_size: MB of the gradients that are reduced last, and of those that are
            reduced first.
          find_unused_parameters: a warning names the parameters that a loss does not reach. Their
            gradient is zero either way.
          group: devices of `gshard.distributed.new_group`, or a mesh; by default all devices.

        Raises:
          GShardError: for a model without parameters, or sizes that cannot be.
        """
        if cls is not DataParallel:  # a copy, made by NNX
            return object.__new__(cls)
        del strategy
        refuse_wrapped(layers, "DataParallel")
        size = check_integer("comm_buffer_size", comm_buffer_size, 0, " of MB (0: no buckets)")
        last = last_comm_buffer_size
        if isinstance(last, bool) or not isinstance(last, Real) or not 0 < last < math.inf:
            raise GShardError(
                f"last_comm_buffer_size={shown(last)} must be a positive number of MB."
            )
        flag("find_unused_parameters", find_unused_parameters)
        module = as_module(layers, "DataParallel")
        arrays = jax.tree.leaves(nnx.state(module, nnx.Param))
        if not arrays:
            raise GShardError(
                "DataParallel: this model has no nnx.Param to train, and needs no DataParallel."
            )
        mesh, replica_axes = mesh_of(group)
        pair = (module, nnx.Optimizer(module, optax.identity(), wrt=nnx.Param))
        (model, _), plan = shard_train_state(pair, mesh, "dp", replica_axes=replica_axes)
        width = max(x.dtype.itemsize for x in arrays)
        keep = Accumulation(
            plan,
            bucket_size=size * _MB // width,
            end_bucket_size=max(1, int(last * _MB) // width),
            find_unused=find_unused_parameters,
        )
        return wrapped(model, DataParallel, keep)

    def __init__(self, *_: Any, **__: Any):
        """The model is made by then."""

    def scale_loss(self, loss: Any) -> Any:
        """The loss as it is: gradients are averaged anyway."""
        return loss

    def apply_collective_grads(self) -> None:
        """Nothing: gradients are reduced by `backward`."""


def fused_allreduce_gradients(parameters: Iterable[Any], hcg: Any = None) -> None:
    """Reduces what `no_sync` left on each device, into the `grads` of the model.

    Args:
      parameters: `model.parameters()` of wrapped models; of some all gradients are reduced.
      hcg: only None; which devices are averaged over says the model's own group.

    Raises:
      GShardError: these are not parameters of a wrapped model.
    """
    if hcg is not None:
        raise GShardError(
            f"fused_allreduce_gradients: hcg={shown(hcg)}. Gradients are reduced over the devices "
            "that the model was wrapped for; pass None."
        )
    if isinstance(parameters, (str, Mapping)) or not isinstance(parameters, Iterable):
        raise GShardError(
            f"fused_allreduce_gradients: {shown(parameters)} are no parameters. Pass "
            "model.parameters()."
        )
    for keep in owners(list(parameters)):
        keep.reduce()
