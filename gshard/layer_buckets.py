"""Which divided leaves of a scope are made whole together: small ones of a layer, used in turn.

A bucket with leaves of all layers would hold them whole from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gshard.buckets import buckets
from gshard.divided_leaf import Divided, move_together
from gshard.places import Places


def move_layers_together(jaxpr: Any, args: Sequence[Any], buffer_max_size: int) -> None:
    """Puts leaves among the inputs of a scope into common buckets.

    Args:
      jaxpr: of the scope; nothing of it is evaluated yet.
      args: its inputs.
      buffer_max_size: elements of one bucket.
    """
    leaves = {v: x for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, Divided)}
    if len(leaves) < 2 or not buffer_max_size:
        return
    places = Places(jaxpr)
    found = [
        (leaves[v], casts)
        for v, casts in places.whole_here().items()
        if v in leaves and len(casts) < 2 and not leaves[v].use.neighbours
    ]
    sizes, kinds, run, layer = [], [], 0, None
    for leaf, casts in found:
        use = leaf.use
        run += use.layer != layer
        layer = use.layer
        sizes.append((use.reduced if use.stored.dim is None else use.stored).local().stored_size)
        dtypes = tuple(casts or [leaf.dtype]), use.converts and use.reduced.dtype
        groups = [None if x.dim is None else x.group for x in (use.stored, use.reduced)]
        kinds.append((run, use.purpose, *groups, *dtypes, bool(use.reshard)))
    for bucket in buckets(sizes, kinds, buffer_max_size):
        if len(bucket) > 1:
            members = [found[i] for i in bucket]
            move_together([leaf.cast(casts[0]) if casts else leaf for leaf, casts in members])
