"""Which dimensions of a leaf lie over mesh axes of the user's own, such as tensor parallelism.

Flax's metadata says so (`nn.with_partitioning(init, (None, "model"))`, NNX `out_sharding=`), or the
sharding of the arrays themselves. XLA does what these axes need; gshard divides nothing over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from gshard.errors import GShardError, some, warn
from gshard.layout import Layout
from gshard.mesh import Group

Names = tuple[tuple[str, ...], ...]  # for every dimension the axes it lies over


def user_names(path: str, leaf: Any, metadata: Sequence[Any] | None, group: Group) -> Names:
    """The user's axes of every dimension of a leaf.

    Args:
      path: of the leaf, for messages.
      leaf: an array, concrete or abstract.
      metadata: what Flax's metadata names the dimensions, if anything. Names that are no axis of
        the mesh (logical ones) say nothing.
      group: the axes of the mesh.

    Raises:
      GShardError: a dimension does not divide by its axes.
    """
    sharding = getattr(leaf, "sharding", None)
    said = [_tuple(name) for name in metadata or ()]
    _warn_of_data_axes(path, said, group)
    sizes = dict(group.user)
    if not any(name in sizes for names in said for name in names):
        said = [_tuple(x) for x in sharding.spec] if isinstance(sharding, NamedSharding) else []
    found = [tuple(name for name in names if name in sizes) for names in said]
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
    used = {name for layout in layouts for names in layout.user for name in names}
    idle = [name for name, size in group.user if size > 1 and name not in used]
    if idle:
        warn(
            f"no parameter lies over the mesh axes {some(idle)}: the devices along them repeat the "
            "same work. Name them in the model's metadata (nn.with_partitioning), place the "
            "parameters over them, or divide over them too: shard_axes="
            f"{(*group.shard, *idle)}."
        )


def _warn_of_data_axes(path: str, said: Sequence[tuple[str, ...]], group: Group) -> None:
    named = sorted({name for names in said for name in names} & set(group.axes))
    if named:
        warn(
            f"the metadata of {path} names {some(named)}, over which gshard divides by its own "
            "rules: it is not followed there. For tensor parallelism give the mesh an axis of its "
            f"own, gshard.make_mesh(extra={{{named[0]!r}: ...}}), or say shard_axes= without it."
        )


def _tuple(names: Any) -> tuple[str, ...]:
    return () if names is None else tuple(names) if isinstance(names, (tuple, list)) else (names,)
