"""`DistributedDataParallel`: `gshard.wrapped.DataParallel` with PyTorch's arguments."""

from __future__ import annotations

from typing import Any

from gshard._util.arguments import named_arguments
from gshard._util.validation import check_integer
from gshard.wrapped.data_parallel import DataParallel, copied, data_parallel

_BUCKET, _FIRST_BUCKET = 25, 1  # MB, as in PyTorch
_INSTEAD = {
    "dim": "Leave it out: examples are along the first dimension.",
    "check_reduction": "Leave it out: it has no effect in PyTorch either.",
    "broadcast_buffers": "Leave it out: buffers become their mean over devices.",
    "init_sync": "Leave it out: all processes take the values of the first one.",
    "device_mesh": "It is process_group= here, which takes a mesh too.",
    "layers": "It is module= here.",
    "group": "It is process_group= here.",
    "comm_buffer_size": "It is bucket_cap_mb= here.",
    "mixed_precision": "Give the layers dtype=jnp.bfloat16: they then compute in it.",
    **dict.fromkeys(
        ("sharding_strategy", "auto_wrap_policy", "cpu_offload"),
        'It is FSDP\'s: gshard.shard_train_state(state, mesh, "fsdp") shards parameters as well.',
    ),
}


class DistributedDataParallel(DataParallel):
    """A model whose `backward` averages gradients over all devices.

    An instance is also an instance of the model's own class.

    Example:
      >>> from flax import nnx
      >>> ddp = gshard.pytorch.DistributedDataParallel(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> opt = gshard.pytorch.ZeroRedundancyOptimizer(ddp.parameters(), optax.adam, lr=1e-3)
      >>> loss = ddp.backward(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch)
      >>> _ = opt.step()
      >>> opt.zero_grad()
    """

    __slots__ = ()

    @named_arguments(_INSTEAD)
    def __new__(
        cls,
        module: Any = None,
        device_ids: Any = None,
        output_device: Any = None,
        *,
        process_group: Any = None,
        bucket_cap_mb: int | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> Any:
        """Wraps a copy of a model; the model itself is not changed.

        Args:
          module: an NNX module, or `(linen_module, variables)`.
          device_ids: ignored; a process has all of its devices.
          output_device: ignored; outputs are sharded over the devices.
          process_group: devices from `gshard.distributed.new_group`, or a mesh. Default: all
            devices.
          bucket_cap_mb: size of a gradient bucket in MB (2^20 bytes), 25 by default; 0 turns
            buckets off.
          find_unused_parameters: warn of the parameters that the loss does not depend on. Their
            gradient is zero either way, and weight decay still changes them.
          gradient_as_bucket_view: ignored; XLA decides about copies.
          static_graph: ignored; a compiled program always is one.

        Returns:
          The wrapped model.

        Raises:
          GShardError: the model has no parameters, or a size is out of range.
        """
        if cls is not DistributedDataParallel:
            return copied(cls)
        del device_ids, output_device, gradient_as_bucket_view, static_graph
        size = _BUCKET if bucket_cap_mb is None else bucket_cap_mb
        size = check_integer("bucket_cap_mb", size, 0, " of MB (0: no buckets)")
        find = find_unused_parameters
        return data_parallel(
            cls, module, size, _FIRST_BUCKET, find, process_group, argument="process_group"
        )
