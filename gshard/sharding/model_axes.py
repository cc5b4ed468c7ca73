"""Finds the dimensions of a leaf that are sharded over the user's model-parallel mesh axes.

They come from Flax's metadata (`nn.with_partitioning(init, (None, "model"))`, NNX `out_sharding=`,
logical names with rules) or from the sharding of the arrays. XLA inserts the collectives for these
axes; gshard shards nothing over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from gshard._util.errors import GShardError, some, warn
from gshard.sharding.layout import Layout
from gshard.sharding.mesh import Group, entry_axes

Names = tuple[tuple[str, ...], ...]  # by dimension, the axes that it is sharded over


def model_axes_of(path: str, leaf: Any, metadata: Sequence[Any] | None, group: Group) -> Names:
    """Returns, by dimension, the model-parallel axes that a leaf is sharded over.

    Args:
      path: path of the leaf, for messages.
      leaf: an array, concrete or abstract.
      metadata: the names of its dimensions in Flax's metadata, if any. Names that are not a mesh
        axis are ignored.
      group: the axes of the mesh.

    Raises:
      GShardError: a dimension is not divisible by its axes, an axis is named twice, or there are
        more names than dimensions.
    """
    sharding = getattr(leaf, "sharding", None)
    said = [entry_axes(name) for name in metadata or ()]
    sizes = dict(group.model_axes)
    if not any(name in sizes for names in said for name in names):
        said = [entry_axes(x) for x in sharding.spec] if isinstance(sharding, NamedSharding) else []
    found = [tuple(name for name in names if name in sizes) for names in said]
    every = [name for names in found for name in names]
    if len(set(every)) < len(every) or any(found[len(leaf.shape) :]):
        raise GShardError(
            f"{path} {tuple(leaf.shape)} is named {tuple(metadata or ())}: name each mesh axis "
            "once, and one entry for each dimension."
        )
    found = found[: len(leaf.shape)] + [()] * (len(leaf.shape) - len(found))
    for dim, (names, size) in enumerate(zip(found, leaf.shape, strict=True)):
        parts = math.prod(sizes[name] for name in names)
        if size % parts:
            raise GShardError(
                f"dimension {dim} of {path} {tuple(leaf.shape)} is to lie over the mesh "
                f"{'axes' if len(names) > 1 else 'axis'} {', '.join(names)} of {parts} devices, "
                "which does not divide it. Make it a multiple, or leave that dimension whole."
            )
    return tuple(found) if any(found) else ()


def warn_of_idle_axes(layouts: Sequence[Layout], group: Group) -> None:
    """Warns of model-parallel axes that shard nothing: devices along them repeat work."""
    used = {name for layout in layouts for names in layout.model_axes for name in names}
    idle = [name for name, size in group.model_axes if size > 1 and name not in used]
    if idle:
        warn(
            f"no parameter is sharded over mesh axes {some(idle)}: devices along them repeat the "
            "same work. Name them in the model's metadata (nn.with_partitioning; logical names "
            "need rules, nn.logical_axis_rules, where shard_train_state is called), give it arrays "
            f"that lie over them, or divide over them too: shard_axes={(*group.shard, *idle)}."
        )


def warn_of_data_axes(metadata: Mapping[str, Sequence[Any]], group: Group) -> None:
    """Warns once if metadata names data axes, which gshard shards over by its own rules."""
    paths: dict[str, list[str]] = {}
    for path, names in metadata.items():
        for name in {x for entry in names for x in entry_axes(entry)} & set(group.axes):
            paths.setdefault(name, []).append(path)
    if paths:
        axis = min(paths)
        rest = tuple(name for name in group.shard if name not in paths) or ("shard",)
        warn(
            f"the metadata of {some(paths[axis])} names the mesh axis {axis!r}, over which gshard "
            "divides by its own rules: it is not followed there. If that axis is for tensor "
            f"parallelism, say which ones divide: shard_axes={rest}."
        )
