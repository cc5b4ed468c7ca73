"""Which dimensions of a leaf lie over mesh axes of the user's own, such as tensor parallelism.

Flax's metadata says so (`nn.with_partitioning(init, (None, "model"))`, NNX `out_sharding=`, logical
names by their rules), or the sharding of the arrays themselves. XLA does what these axes need;
gshard divides nothing over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from gshard._util.errors import GShardError, some, warn
from gshard.sharding.layout import Layout
from gshard.sharding.mesh import Group, entry_axes

Names = tuple[tuple[str, ...], ...]  # for every dimension the axes it lies over


def model_axes_of(path: str, leaf: Any, metadata: Sequence[Any] | None, group: Group) -> Names:
    """The user's axes of every dimension of a leaf.

    Args:
      path: of the leaf, for messages.
      leaf: an array, concrete or abstract.
      metadata: what Flax's metadata names the dimensions, if anything. Names that are no axis of
        the mesh say nothing.
      group: the axes of the mesh.

    Raises:
      GShardError: a dimension does not divide by its axes, an axis is named twice, or a dimension
        that there is not.
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
    """Warns of axes of the user's over which nothing lies: their devices repeat each other."""
    used = {name for layout in layouts for names in layout.model_axes for name in names}
    idle = [name for name, size in group.model_axes if size > 1 and name not in used]
    if idle:
        warn(
            f"no parameter lies over the mesh axes {some(idle)}: the devices along them repeat the "
            "same work. Name them in the model's metadata (nn.with_partitioning; logical names "
            "need rules, nn.logical_axis_rules, where shard_train_state is called), give it arrays "
            f"that lie over them, or divide over them too: shard_axes={(*group.shard, *idle)}."
        )


def warn_of_data_axes(metadata: Mapping[str, Sequence[Any]], group: Group) -> None:
    """Warns once of metadata, by path, that names data axes: gshard divides over these itself."""
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
