"""Layouts, which describe how each array is stored over the mesh. No other file pads arrays.

A rule chooses the dimension that gshard shards. The dimensions on the user's model-parallel axes
come from Flax's metadata (`nn.with_partitioning(init, (None, "model"))`, NNX `out_sharding=`,
logical names with rules) or from the sharding of the arrays; XLA inserts the collectives for these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten
from gshard.sharding.group import Group, entry_axes
from gshard.sharding.quantized import BlockCodes
from gshard.sharding.rules import LeafInfo, Rule, ShardDim

DEVICE, HOST = "device", "pinned_host"  # JAX's names of memory kinds
AxesByDim = tuple[tuple[str, ...], ...]  # by dimension, the mesh axes that it is sharded over


@dataclass(frozen=True)
class Kept:
    """A shard axis that an array is kept on: sharded over it, and never gathered over it.

    Attributes:
      axis: its name.
      dim: the dimension of the array that is sharded over it.
      devices: along the axis.
    """

    axis: str
    dim: int
    devices: int


@dataclass(frozen=True)
class Layout:
    """One array of the train state: its logical shape, and how it is stored over the mesh.

    Attributes:
      path: keys joined by `/`.
      shape: logical shape, which the loss, optax and checkpoints see.
      dtype: dtype of the stored array.
      dim: the dimension that is sharded, or None for a replicated array.
      group: axes of the mesh; `dim` is sharded over `group.shard`, major to minor. That of a kept
        array lacks the axis on which it is kept.
      scan_dim: the dimension that a scan over layers iterates over, or None.
      reason: why this dimension was chosen, for the table of the plan.
      model_axes: by dimension, the model-parallel mesh axes that it is sharded over; () for none.
      memory: where the array is stored between steps, `"device"` or `"pinned_host"`.
      gathered_as: how an all-gather for the loss sends the array in fewer bits; None: as it is.
      scattered_as: the same of a reduce-scatter.
      kept: the shard axis on which the array stays; None for one that is gathered over all.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    group: Group
    scan_dim: int | None
    reason: str
    model_axes: AxesByDim = ()
    memory: str = DEVICE
    gathered_as: BlockCodes | None = None
    scattered_as: BlockCodes | None = None
    kept: Kept | None = None

    @property
    def padding(self) -> int:
        """Size of the zero padding at the end of `dim` in storage."""
        return 0 if self.dim is None else -self.shape[self.dim] % self.group.size

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Global shape in storage: the logical shape plus the padding."""
        return self._with_dim(lambda size: size + self.padding)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one device's shard over the shard axes; model-parallel axes do not count."""
        return self.inside()._with_dim(lambda size: (size + self.padding) // self.group.size)

    @property
    def size(self) -> int:
        """Number of elements of the logical shape."""
        return math.prod(self.shape)

    @property
    def stored_size(self) -> int:
        """Number of elements in storage, with padding."""
        return math.prod(self.stored_shape)

    @property
    def bytes_per_device(self) -> int:
        """Number of bytes on one device, with padding."""
        return math.prod(self.local().shard_shape) * self.dtype.itemsize

    @property
    def spec(self) -> jax.P:
        """The `PartitionSpec` in storage, over all mesh axes."""
        return self._spec_with(self.model_axes)

    @property
    def data_spec(self) -> jax.P:
        """The `PartitionSpec` over the shard axes alone, for a `shard_map` over the data axes."""
        return self._spec_with(())

    def _spec_with(self, axes: AxesByDim) -> jax.P:
        found = list(axes or [()] * len(self.shape))
        if self.dim is not None:
            found[self.dim] = self.group.shard
        if self.kept is not None:
            found[self.kept.dim] = (self.kept.axis,)
        return _spec(found)

    @property
    def model_spec(self) -> jax.P:
        """The `PartitionSpec` over the model-parallel axes alone."""
        return _spec(self.model_axes)

    def inside(self) -> Layout:
        """Returns the layout in a `shard_map` over the data axes, where a kept array is a part."""
        if self.kept is None:
            return self
        dim, devices = self.kept.dim, self.kept.devices
        shape = tuple(n // devices if d == dim else n for d, n in enumerate(self.shape))
        return dataclasses.replace(self, shape=shape, kept=None)

    def local(self) -> Layout:
        """Returns the layout that one device of the model-parallel and kept axes sees.

        `shape` is that of its part.
        """
        if self.kept is not None:
            return self.inside().local()
        if not self.group.model_axes:
            return self
        sizes = dict(self.group.model_axes)
        axes = self.model_axes or ((),) * len(self.shape)
        shape = tuple(
            size // math.prod(sizes[name] for name in names)
            for size, names in zip(self.shape, axes, strict=True)
        )
        group = dataclasses.replace(self.group, model_axes=())
        return dataclasses.replace(self, shape=shape, group=group, model_axes=())

    def over_kept_axis(self) -> Layout:
        """Returns the layout of an array that is sharded over the axis it is kept on alone."""
        if self.kept is None:
            raise ValueError(f"{self.path} is not kept")
        one = (self.kept.axis,), (self.kept.devices,)
        group = dataclasses.replace(self.group, shard=one[0], sizes=one[1], across_nodes=0)
        return dataclasses.replace(self, dim=self.kept.dim, group=group, kept=None)

    @property
    def on_host(self) -> bool:
        """Whether the array is stored in host memory."""
        return self.memory != DEVICE

    def in_memory(self, memory: str) -> Layout:
        """Returns the same layout, stored in `memory`."""
        return self if memory == self.memory else dataclasses.replace(self, memory=memory)

    def replicated(self) -> Layout:
        """Returns the same layout, replicated over the shard group."""
        return dataclasses.replace(self, dim=None)

    def layer(self) -> Layout:
        """Returns the layout of one layer of a stack that is scanned over its first dimension."""
        if self.dim == 0:
            raise GShardError(f"{self.path}: the scanned dimension 0 is sharded. Shard another.")
        dim = None if self.dim is None else self.dim - 1
        one = dataclasses.replace(
            self, shape=self.shape[1:], dim=dim, scan_dim=None, model_axes=self.model_axes[1:]
        )
        for name in ("gathered_as", "scattered_as"):  # blocks along the stack do not exist in it
            how = getattr(one, name)
            if how is not None and how.dim < -len(one.shape):
                one = dataclasses.replace(one, **{name: None})
        return one

    def packed(self, how: BlockCodes | None) -> Layout:
        """Returns the layout of what a collective sends; `how` is one of the `_as` attributes."""
        if how is None:
            return self
        shape, dtype = how.packed_shape(self.shape), np.dtype(np.uint8)
        return dataclasses.replace(
            self, shape=shape, dtype=dtype, gathered_as=None, scattered_as=None
        )

    def pad(self, x: Any) -> Any:
        """Pads an array of logical shape to its shape in storage, with zeros."""
        if not self.padding:
            return x
        widths = [(0, self.padding if d == self.dim else 0) for d in range(len(self.shape))]
        return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)

    def as_stored(self, x: Any, what: str) -> Any:
        """Returns an array in its storage shape, padding one of logical shape; `what` names it."""
        if x.shape == self.stored_shape:
            return x
        if x.shape == self.shape:
            return self.pad(x)
        raise GShardError(
            f"{what}: {self.path} has shape {x.shape}; the plan has {self.shape} (stored as "
            f"{self.stored_shape}). Pass an array of one of these two shapes."
        )

    def unpad(self, x: Any) -> Any:
        """Cuts the padding off an array in storage shape."""
        if not self.padding or self.dim is None:
            return x
        if isinstance(x, np.ndarray):
            return x[tuple(slice(size) for size in self.shape)]
        return lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)

    def _with_dim(self, size_of: Callable[[int], int]) -> tuple[int, ...]:
        return tuple(size_of(s) if d == self.dim else s for d, s in enumerate(self.shape))


def lay_out(
    path: str,
    leaf: Any,
    group: Group,
    rule: Rule | None = None,
    *,
    scan_dim: int | None = None,
    model_axes: AxesByDim = (),
    params_replicated: bool = False,
    kept: Kept | None = None,
) -> Layout:
    """Makes the layout of an array, concrete or abstract; without a rule it is replicated.

    `group` is without the axis on which the array is kept. With `params_replicated` the layout is
    for gradient and optimizer state alone.
    """
    shape, choice = tuple(leaf.shape), None
    if rule is None:
        choice = ShardDim(None, "not sharded at this level")
    elif group.size == 1:
        choice = ShardDim(None, "one device in the shard group")
    elif jnp.issubdtype(leaf.dtype, jnp.number):
        taken = {d for d, names in enumerate(model_axes) if names}
        taken = frozenset(taken if kept is None else {*taken, kept.dim})
        info = LeafInfo(path, shape, leaf.dtype, scan_dim, group.size, taken, params_replicated)
        choice = rule(info)
    dim, reason = (choice.dim, choice.reason) if choice else (None, f"{leaf.dtype} is not a number")
    return Layout(path, shape, leaf.dtype, dim, group, scan_dim, reason, model_axes, kept=kept)


def all_replicated(tree: Any, group: Group) -> Any:
    """Returns the layouts of a tree of replicated arrays."""
    paths, leaves, structure = flatten(tree)
    return structure.unflatten(lay_out(p, x, group) for p, x in zip(paths, leaves, strict=True))


def model_axes_of(path: str, leaf: Any, metadata: Sequence[Any] | None, group: Group) -> AxesByDim:
    """Returns, by dimension, the model-parallel axes that a leaf is sharded over.

    `metadata` are the names of its dimensions in Flax's metadata, if any; those that are not mesh
    axes are ignored.
    """
    shape, sizes = tuple(leaf.shape), dict(group.model_axes)
    sharding = getattr(leaf, "sharding", None)
    named = [entry_axes(name) for name in metadata or ()]
    if not any(name in sizes for names in named for name in names):
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        named = [entry_axes(entry) for entry in spec]
    found = [tuple(name for name in names if name in sizes) for names in named]
    every = [name for names in found for name in names]
    if len(set(every)) < len(every) or any(found[len(shape) :]):
        raise GShardError(
            f"{path} {shape} is named {tuple(metadata or ())}: name each mesh axis once, and give "
            "one entry for each dimension."
        )
    if not every:
        return ()
    found = found[: len(shape)] + [()] * (len(shape) - len(found))
    for dim, (names, size) in enumerate(zip(found, shape, strict=True)):
        devices = math.prod(sizes[name] for name in names)
        if size % devices:
            raise GShardError(
                f"dimension {dim} of {path} {shape} is not divisible by the {devices} devices of "
                f"the mesh {'axes' if len(names) > 1 else 'axis'} {', '.join(names)} that it is to "
                "be sharded over. Make its size a multiple, or leave that dimension unsharded."
            )
    return tuple(found)


def _spec(axes: Sequence[tuple[str, ...]]) -> jax.P:
    """Converts axes by dimension to a `PartitionSpec` without trailing empty entries."""
    named = axes[: max((d + 1 for d, names in enumerate(axes) if names), default=0)]
    return jax.P(*[names if names[1:] else names[0] if names else None for names in named])
